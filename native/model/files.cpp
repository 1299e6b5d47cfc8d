#include "model/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "model/refuse.h"

namespace kd::model {

namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";

std::string reason(int error) {
    char text[128];
    return strerror_r(error, text, sizeof text);  // GNU's: returns the text
}

[[noreturn]] void cannot(const std::string& verb, const std::string& path, int error) {
    fail(KD_E_IO, "%s: cannot %s as user %u: %s; check the path and its permissions", printable(path, 300).c_str(),
         verb.c_str(), static_cast<unsigned>(geteuid()), reason(error).c_str());
}

// The target if `name` is a link as Hugging Face's cache makes them, else empty.
std::string cache_blob(int folder, const char* name) {
    constexpr std::string_view kBlobs = "../../blobs/";
    char link[128];
    const ssize_t n = readlinkat(folder, name, link, sizeof link);
    if (n <= 0 || n == sizeof link) return {};
    const std::string_view to(link, static_cast<size_t>(n));
    if (!to.starts_with(kBlobs) || to.size() == kBlobs.size()) return {};
    if (to.find_first_not_of("0123456789abcdef", kBlobs.size()) != std::string_view::npos) return {};
    return std::string(to);
}

// Whether it ends as shards do: -00001-of-00003.safetensors
bool is_shard(std::string_view name) {
    constexpr std::string_view kEnd = "-00000-of-00000.safetensors";
    if (name.size() <= kEnd.size()) return false;
    name.remove_prefix(name.size() - kEnd.size());
    return std::equal(name.begin(), name.end(), kEnd.begin(),
                      [](char c, char pattern) { return pattern == '0' ? c >= '0' && c <= '9' : c == pattern; });
}

}  // namespace

File::~File() { close(fd_); }

void File::read(void* to, size_t n, uint64_t offset, const std::string& what) const {
    auto* p = static_cast<uint8_t*>(to);
    while (n != 0) {
        const ssize_t got = pread(fd_, p, n, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) cannot("read", path, errno);
        if (got == 0)
            refuse(path, "the file ends at byte " + std::to_string(offset) + ", within " + printable(what, 250) +
                             "; it is truncated, fetch it again");
        p += got;
        n -= static_cast<size_t>(got);
        offset += static_cast<uint64_t>(got);
    }
}

void File::expect(uint64_t offset, uint64_t n) const {
    // Of one call Linux takes no more than the device's readahead or its largest request, and drops the rest.
    constexpr uint64_t kAdvice = uint64_t{4} << 20;
    for (const uint64_t end = offset + n; offset < end; offset += kAdvice)
        posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(std::min(kAdvice, end - offset)),
                      POSIX_FADV_WILLNEED);
}

Folder::Folder(const std::string& path, Links links, const std::string& what) : path_(path), links_(links) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd_ >= 0) return;
    if (errno == ENOENT)
        fail(KD_E_IO, "%s: there is no such %s; check the path", printable(path, 300).c_str(), what.c_str());
    if (errno == ENOTDIR)
        fail(KD_E_IO, "%s: is a file, or leads through one; give the %s that it is in", printable(path, 300).c_str(),
             what.c_str());
    cannot("open the " + what, path, errno);
}

Folder::Folder(const Folder& parent, const std::string& name) : path_(parent.path_of(name)), links_(parent.links_) {
    const int follow = links_ == Links::kFollow ? 0 : O_NOFOLLOW;
    fd_ = openat(parent.fd_, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | follow);
    if (fd_ >= 0) return;
    if (errno == ENOTDIR || errno == ELOOP)  // Linux says ENOTDIR of a link to a folder
        refuse(path_, "is no folder, or a symbolic link to one; give the drafter's own path instead");
    cannot("open the folder", path_, errno);
}

Folder::~Folder() { close(fd_); }

bool Folder::has(const std::string& name) const {
    struct stat st;
    if (fstatat(fd_, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) return true;
    if (errno != ENOENT) cannot("look up", path_of(name), errno);
    return false;
}

std::vector<std::string> Folder::shards() const {
    const int fd = openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* list = fd < 0 ? nullptr : fdopendir(fd);
    if (!list) {
        const int error = errno;
        if (fd >= 0) close(fd);
        cannot("list the folder", path_, error);
    }
    std::vector<std::string> found;
    while (const dirent* entry = readdir(list))
        if (is_shard(entry->d_name)) found.emplace_back(entry->d_name);
    closedir(list);
    std::sort(found.begin(), found.end());
    return found;
}

std::unique_ptr<File> Folder::open(const std::string& name) const {
    const std::string path = path_of(name);
    constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY;
    int fd = openat(fd_, name.c_str(), links_ == Links::kFollow ? kFlags & ~O_NOFOLLOW : kFlags);
    if (fd < 0 && errno == ELOOP && links_ == Links::kCache) {
        const std::string blob = cache_blob(fd_, name.c_str());
        if (blob.empty())
            refuse(path,
                   "is a symbolic link that leads elsewhere; kd follows only those of Hugging Face's own cache: put "
                   "the file itself there, or ask for links to be followed");
        fd = openat(fd_, blob.c_str(), kFlags);
    }
    if (fd < 0 && errno == ENOENT)
        refuse(path, "there is no such file; the model folder is incomplete, fetch it again");
    if (fd < 0) cannot("open the file", path, errno);
    struct stat st;
    if (fstat(fd, &st) != 0) {
        const int error = errno;
        close(fd);
        cannot("look at the file", path, error);
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        refuse(path, "is no regular file; put the file itself there");
    }
    posix_fadvise(fd, 0, 0,
                  POSIX_FADV_RANDOM);  // several threads read: what comes next they say themselves, see expect()
    return std::make_unique<File>(fd, path, static_cast<uint64_t>(st.st_size));
}

std::string Folder::read_text(const std::string& name, size_t max_bytes) const {
    const auto file = open(name);
    if (file->bytes > max_bytes)
        refuse(file->path, "has " + std::to_string(file->bytes) + " bytes, at most " + std::to_string(max_bytes) +
                               " are allowed; this is not the file it should be");
    std::string text(static_cast<size_t>(file->bytes), '\0');
    file->read(text.data(), text.size(), 0, "its text");
    return text;
}

safetensors::Header read_header(const File& file) {
    uint8_t prefix[safetensors::kPrefixBytes];
    if (file.bytes == 0) refuse(file.path, "is empty; fetch it again");
    if (file.bytes < sizeof prefix)
        refuse(file.path, "has " + std::to_string(file.bytes) + " bytes; it is truncated, fetch it again");
    file.read(prefix, sizeof prefix, 0, "its header");
    std::string bytes(static_cast<size_t>(safetensors::header_bytes(prefix, file.bytes, file.path)), '\0');
    file.read(bytes.data(), bytes.size(), 0, "its header");
    if (memcmp(bytes.data(), prefix, sizeof prefix) != 0) refuse(file.path, "changes while it is read; load it again");
    return safetensors::parse(bytes, file.bytes, file.path);
}

bool has_weights(const Folder& folder) {
    return folder.has(kIndexName) || folder.has(kSingleName) || !folder.shards().empty();
}

Checkpoint open_checkpoint(const Folder& folder, const std::function<void()>& pause) {
    const bool has_index = folder.has(kIndexName);
    safetensors::Index index;
    if (has_index) {
        index = safetensors::parse_index(folder.read_text(kIndexName, safetensors::kMaxIndexBytes),
                                         folder.path_of(kIndexName));
        const bool named = std::find(index.files.begin(), index.files.end(), kSingleName) != index.files.end();
        if (!named && folder.has(kSingleName))
            refuse(folder.path(), std::string("holds ") + kSingleName +
                                      " and an index that does not name it; remove the one "
                                      "that is not meant");
    } else {
        if (!folder.has(kSingleName))
            if (const auto shards = folder.shards(); !shards.empty())
                refuse(folder.path_of(kIndexName),
                       "is missing, and without it the weights that are there (" + shards.front() +
                           (shards.size() > 1 ? " to " + shards.back() : "") + ") are not read; fetch it again");
        index.files = {kSingleName};
    }

    Checkpoint c;
    c.headers.reserve(index.files.size());  // c.tensors points into them
    for (size_t i = 0; i < index.files.size(); ++i) {
        pause();
        c.files.push_back(folder.open(index.files[i]));
        c.headers.push_back(read_header(*c.files[i]));
        for (const safetensors::Tensor& t : c.headers[i].tensors) {
            if (has_index) {
                const auto entry = index.file_of.find(t.name);
                if (entry == index.file_of.end())
                    refuse(c.files[i]->path, "holds tensor '" + printable(t.name, 200) +
                                                 "', which the index does not name; "
                                                 "index and files do not belong together");
                if (entry->second != i)
                    refuse(c.files[i]->path, "holds tensor '" + printable(t.name, 200) +
                                                 "', which the index says is in " + index.files[entry->second] +
                                                 "; index and files do not belong together");
            }
            c.tensors.emplace(t.name, Checkpoint::Found{i, &t});
        }
    }
    for (const auto& [name, file] : index.file_of)
        if (!c.tensors.contains(name))
            refuse(c.files[file]->path, "does not hold tensor '" + printable(name, 200) +
                                            "', which the index says is there; "
                                            "the model folder is damaged, fetch it again");
    return c;
}

}  // namespace kd::model
