#include "engine/record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "error.h"

namespace kd {
namespace {

// Where a signal handler finds them. Of more engines in one process the last ones tell of no signal.
std::array<std::atomic<kd_step_record*>, 16> records;

int32_t thread_number() { return int32_t(syscall(SYS_gettid)); }

void store(int32_t& word, int32_t value) { std::atomic_ref(word).store(value, std::memory_order_relaxed); }

int make_file(const std::string& path) {
    const auto refused = [&](int error) {
        fail(KD_E_IO, "%s cannot be made for the record of steps (%s): %s", path.c_str(), strerror(error),
             error == ENOSPC || error == EDQUOT ? "make room there" : "give a path in a folder this user may write");
    };
    // Not one that is there: it may be a link to somewhere else.
    if (unlink(path.c_str()) != 0 && errno != ENOENT) refused(errno);
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) refused(errno);
    // Room is taken now: a full disk later would be a SIGBUS.
    if (const int error = posix_fallocate(fd, 0, sizeof(kd_step_record))) {
        close(fd);
        unlink(path.c_str());
        refused(error);
    }
    return fd;
}

}  // namespace

StepRecord::StepRecord(std::string path, int tp) : path_(std::move(path)) {
    const int fd = path_.empty() ? -1 : make_file(path_);
    void* const p = mmap(nullptr, sizeof(kd_step_record), PROT_READ | PROT_WRITE,
                         fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    const int error = errno;
    if (fd >= 0) close(fd);
    if (p == MAP_FAILED) {
        if (fd >= 0) unlink(path_.c_str());
        fail(KD_E_IO, "%s cannot be mapped for the record of steps (%s): give a path on another file system",
             path_.c_str(), strerror(error));
    }
    record_ = static_cast<kd_step_record*>(p);
    record_->size = sizeof *record_;
    record_->pid = getpid();
    record_->tp = tp;
    for (auto& place : records) {
        kd_step_record* none = nullptr;
        if (place.compare_exchange_strong(none, record_)) break;
    }
}

StepRecord::~StepRecord() {
    for (auto& place : records) {
        kd_step_record* mine = record_;
        place.compare_exchange_strong(mine, nullptr);
    }
    if (!path_.empty() && record_->pid == getpid()) unlink(path_.c_str());
    munmap(record_, sizeof *record_);
}

void StepRecord::enter(int rank, uint64_t step, kd_stage stage) {
    kd_rank_record& r = record_->ranks[rank];
    std::atomic_ref(r.step).store(step, std::memory_order_relaxed);
    store(r.stage, stage);
    if (stage != KD_STAGE_IDLE) store(r.thread, thread_number());
}

void StepRecord::note_signal(int signal) {
    for (auto& place : records) {
        kd_step_record* const record = place.load(std::memory_order_acquire);
        if (!record) continue;
        // The first is the cause; others may follow while the process ends.
        int32_t none = 0;
        if (!std::atomic_ref(record->signal_thread).compare_exchange_strong(none, thread_number())) continue;
        prctl(PR_GET_NAME, record->thread_name);
        store(record->signal, signal);
    }
}

const char* stage_name(kd_stage stage) {
    switch (stage) {
        case KD_STAGE_IDLE: return "idle";
        case KD_STAGE_PREFILL: return "prefill";
        case KD_STAGE_TELL: return "tell";
        case KD_STAGE_CONTEXT: return "context";
        case KD_STAGE_DRAFT: return "draft";
        case KD_STAGE_VERIFY: return "verify";
        case KD_STAGE_DECODE: return "decode";
        case KD_STAGE_SCORE: return "score";
        case KD_STAGE_COPY: return "copy";
    }
    return "?";
}

}  // namespace kd
