#include "model/packed.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "model/fill.h"
#include "model/hash.h"
#include "model/refuse.h"

namespace kd::model {

namespace {

constexpr char kFormat[] = "kd-packed";
constexpr uint64_t kPage =
    4096;  // where the data begins: aligned copies, and room for readers that bypass the page cache

std::string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

std::string layout_name() { return std::to_string(kPackedLayout) + " " + device::weight_layout(); }

using Metadata = std::unordered_map<std::string, std::string>;

const std::string& member(const Metadata& m, const char* key, const std::string& where) {
    const auto found = m.find(key);
    if (found == m.end())
        refuse(where, std::string("its __metadata__ has no ") + key + "; it is no packed file of kd, convert again");
    return found->second;
}

uint64_t number(const Metadata& m, const char* key, const std::string& where, int base) {
    const std::string& text = member(m, key, where);
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end != text.data() + text.size())
        refuse(where, std::string("its __metadata__ has ") + key + " = '" + printable(text, 40) +
                          "', which is no number; the file is damaged, convert again");
    return value;
}

void must_be(const Metadata& m, const char* key, const std::string& expected, const std::string& where) {
    const std::string& found = member(m, key, where);
    if (found != expected)
        refuse(where, std::string("was packed with ") + key + " '" + printable(found, 60) + "', this engine needs '" +
                          expected + "'; convert the checkpoint again with `kdctl convert`");
}

uint64_t end_of(const std::vector<Layout::Part>& parts, size_t i, uint64_t bytes) {
    return i + 1 < parts.size() ? parts[i + 1].at : bytes;
}

constexpr std::string_view kHeaderHash = "\"header_hash\":\"";
constexpr char kNoDigits[] = "0000000000000000";

// Of prefix and header, in which the digits of the hash itself are zeros.
std::string header_hash(const std::string& header) {
    Hash hash;
    hash.add(header);
    return hex(hash.value());
}

void check_header(const File& file, const safetensors::Header& header) {
    std::string bytes(header.data_begin, '\0');
    file.read(bytes.data(), bytes.size(), 0, "its header");
    const std::string expected = member(header.metadata, "header_hash", file.path);
    const size_t at = bytes.find(std::string(kHeaderHash) + expected);
    if (at != std::string::npos) bytes.replace(at + kHeaderHash.size(), expected.size(), kNoDigits);
    if (at == std::string::npos || header_hash(bytes) != expected)
        refuse(file.path, "bytes 0 to " + std::to_string(header.data_begin) +
                              " (its header) are not those that were written; the file is damaged, convert again");
}

}  // namespace

std::string packed_name(int rank) { return "packed-rank-" + std::to_string(rank) + ".safetensors"; }

bool is_packed(const Folder& folder) {
    for (int rank = 0; rank < KD_MAX_TP; ++rank)
        if (folder.has(packed_name(rank))) return true;
    return false;
}

PackedAbout about_packed(const Folder& folder) {
    const auto file = folder.open(packed_name(0));
    const Metadata m = read_header(*file).metadata;
    must_be(m, "format", kFormat, file->path);
    PackedAbout about;
    const uint64_t tp = number(m, "tp", file->path, 10);
    if (tp < 1 || tp > KD_MAX_TP) refuse(file->path, "was packed for " + std::to_string(tp) + " ranks; convert again");
    about.tp = static_cast<int>(tp);
    about.layout = printable(member(m, "layout", file->path), 60);
    about.draft = number(m, "draft_config_hash", file->path, 16) != 0;
    return about;
}

namespace {

struct RankFile {
    std::unique_ptr<File> file;
    safetensors::Header header;
    Info info;  // counts of parameters and hashes
};

// Everything that can be said of a rank's file without this build's layout.
RankFile open_rank(const Folder& folder, const Packing& p, const std::string& layout, int tp, int rank) {
    RankFile r{folder.open(packed_name(rank)), {}, {}};
    const std::string& where = r.file->path;
    r.header = read_header(*r.file);
    const Metadata& m = r.header.metadata;
    must_be(m, "format", kFormat, where);
    must_be(m, "layout", layout, where);
    if (const uint64_t packed = number(m, "tp", where, 10); packed != static_cast<uint64_t>(tp))
        refuse(where, "was packed for tp " + std::to_string(packed) + ", not for tp " + std::to_string(tp) +
                          "; run it with tp " + std::to_string(packed) +
                          ", or convert the checkpoint that it was made of with `kdctl convert --tp " +
                          std::to_string(tp) + "`");
    must_be(m, "rank", std::to_string(rank), where);
    const bool draft = p.draft_config_hash != 0;
    if (number(m, "config_hash", where, 16) != p.config_hash ||
        (draft && number(m, "draft_config_hash", where, 16) != p.draft_config_hash))
        refuse(where, "was packed with another config.json than the one beside it; convert the checkpoint again");
    r.info.parameters = number(m, "parameters", where, 10);
    if (draft) r.info.draft_parameters = number(m, "draft_parameters", where, 10);
    r.info.content_hash = number(m, draft ? "content_hash" : "target_hash", where, 16);
    r.info.target_hash = number(m, "target_hash", where, 16);
    return r;
}

void must_be_of_one(const Info& first, const RankFile& r) {
    if (r.info.content_hash != first.content_hash)
        refuse(r.file->path, "was packed from another checkpoint than " + packed_name(0) + "; convert it again");
}

}  // namespace

void look_at_packed(const Folder& folder, const Packing& packing, PackedAbout& about) {
    if (about.layout == layout_name()) Packed(folder, packing, about.tp);
    for (int rank = 0; rank < about.tp; ++rank) {
        const RankFile r = open_rank(folder, packing, about.layout, about.tp, rank);
        if (rank == 0) about.info = r.info;
        must_be_of_one(about.info, r);
        check_header(*r.file, r.header);
        about.files += 1, about.file_bytes += r.file->bytes, about.tensors += r.header.tensors.size();
    }
}

Packed::Packed(const Folder& folder, const Packing& packing, int tp) : parts_(packing.parts) {
    for (int rank = 0; rank < tp; ++rank) open(folder, packing, tp, rank);
    // All devices are fed at once.
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
}

void Packed::open(const Folder& folder, const Packing& p, int tp, int rank) {
    RankFile r = open_rank(folder, p, layout_name(), tp, rank);
    if (rank == 0) info_ = r.info;
    must_be_of_one(info_, r);
    const safetensors::Header& header = r.header;
    files_.push_back(std::move(r.file));
    const std::string& where = files_.back()->path;
    const Metadata& m = header.metadata;
    const bool draft = p.draft_config_hash != 0;
    must_be(m, draft ? "bytes" : "target_bytes", std::to_string(p.bytes), where);
    must_be(m, draft ? "fingerprint" : "target_fingerprint", hex(p.fingerprint), where);

    const std::string& hashes = member(m, "hashes", where);
    data_begin_.push_back(header.data_begin);
    if (header.tensors.size() < parts_.size())
        refuse(where, "holds " + std::to_string(header.tensors.size()) + " parts, the layout has " +
                          std::to_string(parts_.size()) + "; the file is damaged, convert again");
    size_t next = 0;  // of 16 digits each
    for (size_t i = 0; i < parts_.size(); ++i) {
        const safetensors::Tensor& t = header.tensors[i];
        const uint64_t begin = parts_[i].at, end = end_of(parts_, i, p.bytes);
        if (t.name != parts_[i].name || t.type != safetensors::Type::u8 || t.begin - header.data_begin != begin ||
            t.end - header.data_begin != end)
            refuse(where, "tensor '" + printable(t.name, 200) + "' stands where part '" + parts_[i].name +
                              "' of the layout should; the file is damaged, convert again");
        for (uint64_t at = begin; at < end; at += kPieceBytes, ++next) {
            uint64_t hash = 0;
            const char* text = hashes.data() + 16 * next;
            if (16 * (next + 1) > hashes.size() || std::from_chars(text, text + 16, hash, 16).ptr != text + 16)
                refuse(where, "its __metadata__ has too few hashes; the file is damaged, convert again");
            pieces_.push_back({rank, at, std::min(kPieceBytes, end - at), hash, i});
        }
    }
    check_header(*files_.back(), header);
    read_bytes_ += p.bytes;
}

void Packed::read(const Piece& piece, Loaded& loaded, Progress& progress, const Buffers& buffers,
                  const Stop& stop) const {
    const auto rank = static_cast<size_t>(piece.rank);
    const File& file = *files_[rank];
    device::bind(device::context(loaded.group(), piece.rank));
    const size_t chunk = model::read_bytes();
    Hash hash;
    uint8_t *buffer = buffers.chunk(), *uploading = buffers.share();
    for (uint64_t at = 0; at < piece.bytes; at += chunk) {
        pause(progress);
        if (stop()) break;
        const auto n = static_cast<size_t>(std::min<uint64_t>(chunk, piece.bytes - at));
        uint8_t* const to = loaded.arena(piece.rank) + piece.begin + at;
        void* const lands = device::landing(to, buffer);
        file.read(lands, n, data_begin_[rank] + piece.begin + at, "tensor '" + parts_[piece.part].name + "'");
        hash.add(lands, n);
        if (lands == buffer) {
            device::settle();  // the other buffer is read into next, while this one goes up
            device::upload(to, buffer, n);
            std::swap(buffer, uploading);
        }
        progress.bytes_done += n;
    }
    device::settle();
    if (stop()) return;
    if (hash.value() != piece.hash)
        refuse(file.path, "bytes " + std::to_string(data_begin_[rank] + piece.begin) + " to " +
                              std::to_string(data_begin_[rank] + piece.begin + piece.bytes) + " (tensor '" +
                              parts_[piece.part].name +
                              "') are not those that were written; the file is damaged, convert again");
}

void Packed::fill(Loaded& loaded, Progress& progress) const {
    const int readers = reader_count(read_bytes_);
    const auto expect = [&](size_t job) {
        if (job >= pieces_.size()) return;
        const auto rank = static_cast<size_t>(pieces_[job].rank);
        files_[rank]->expect(data_begin_[rank] + pieces_[job].begin, pieces_[job].bytes);
    };
    for (int i = 0; i < readers; ++i) expect(static_cast<size_t>(i));
    read_parallel(pieces_.size(), readers, device::context(loaded.group(), 0),
                  [&](size_t job, Buffers& buffers, const Stop& stop) {
                      expect(job + static_cast<size_t>(readers));  // the disk works on while this one is copied
                      read(pieces_[job], loaded, progress, buffers, stop);
                  });
}

// ---- writing --------------------------------------------------------------------------------------------------------

namespace {

class Writer {
  public:
    explicit Writer(const std::string& path) : path_(path) {
        fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd_ < 0) cannot("create");
    }
    ~Writer() {
        if (fd_ >= 0) {  // given up
            close(fd_);
            unlink(path_.c_str());
        }
    }
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    void write(const void* data, size_t n, uint64_t offset) const {
        const auto* p = static_cast<const uint8_t*>(data);
        while (n != 0) {
            const ssize_t put = pwrite(fd_, p, n, static_cast<off_t>(offset));
            if (put < 0 && errno == EINTR) continue;
            if (put <= 0) cannot("write");
            p += put;
            n -= static_cast<size_t>(put);
            offset += static_cast<uint64_t>(put);
        }
    }
    void finish() {
        if (fsync(fd_) != 0 || close(std::exchange(fd_, -1)) != 0) cannot("write");
    }

  private:
    [[noreturn]] void cannot(const char* verb) const {
        const int error = errno;
        char text[128];
        fail(KD_E_IO, "%s: cannot %s it: %s; give another folder or make room", printable(path_, 300).c_str(), verb,
             strerror_r(error, text, sizeof text));
    }

    std::string path_;
    int fd_;
};

// Prefix and header, padded to a page.
std::string header_of(const Loaded& loaded, int rank, const std::vector<uint64_t>& hashes) {
    const Packing& p = loaded.packing;
    const Info& info = loaded.info;
    std::string digits;
    for (const uint64_t hash : hashes) digits += hex(hash);
    std::string s = "{\"__metadata__\":{";
    const auto text = [&](const char* key, const std::string& value) {
        s += std::string("\"") + key + "\":\"" + value + "\",";
    };
    text("format", kFormat);
    text("layout", layout_name());
    text("tp", std::to_string(loaded.ranks.size()));
    text("rank", std::to_string(rank));
    text("bytes", std::to_string(p.bytes));
    text("fingerprint", hex(p.fingerprint));
    text("target_bytes", std::to_string(p.target_bytes));
    text("target_fingerprint", hex(p.target_fingerprint));
    text("content_hash", hex(info.content_hash));
    text("target_hash", hex(info.target_hash));
    text("parameters", std::to_string(info.parameters));
    text("draft_parameters", std::to_string(info.draft_parameters));
    text("config_hash", hex(p.config_hash));
    text("draft_config_hash", hex(p.draft_config_hash));
    text("header_hash", kNoDigits);
    text("hashes", digits);
    s.back() = '}';
    for (size_t i = 0; i < p.parts.size(); ++i) {
        const std::string begin = std::to_string(p.parts[i].at), end = std::to_string(end_of(p.parts, i, p.bytes));
        s += ",\"" + p.parts[i].name + "\":{\"dtype\":\"U8\",\"shape\":[" +
             std::to_string(end_of(p.parts, i, p.bytes) - p.parts[i].at) + "],\"data_offsets\":[" + begin + "," + end +
             "]}";
    }
    s += "}";
    s.append((kPage - (s.size() + safetensors::kPrefixBytes) % kPage) % kPage, ' ');
    const uint64_t n = s.size();
    s.insert(0, reinterpret_cast<const char*>(&n), sizeof n);
    const std::string hash = header_hash(s);
    return s.replace(s.find(kHeaderHash) + kHeaderHash.size(), hash.size(), hash);
}

void save_rank(const Loaded& loaded, int rank, const std::string& path, Progress& progress) {
    const Packing& p = loaded.packing;
    struct Piece {
        uint64_t begin, bytes;
    };
    std::vector<Piece> pieces;
    for (size_t i = 0; i < p.parts.size(); ++i)
        for (uint64_t at = p.parts[i].at, end = end_of(p.parts, i, p.bytes); at < end; at += kPieceBytes)
            pieces.push_back({at, std::min(kPieceBytes, end - at)});
    std::vector<uint64_t> hashes(pieces.size());
    const uint64_t data_begin = header_of(loaded, rank, hashes).size();  // as long as with the hashes in it

    Writer file(path + "/" + packed_name(rank));
    device::Context* const context = device::context(loaded.group(), rank);
    read_parallel(pieces.size(), reader_count(p.bytes), context, [&](size_t job, Buffers& buffers, const Stop& stop) {
        const Piece& piece = pieces[job];
        Hash hash;
        device::bind(context);
        for (uint64_t at = 0; at < piece.bytes; at += kChunkBytes) {
            pause(progress);
            if (stop()) return;
            const auto n = static_cast<size_t>(std::min<uint64_t>(kChunkBytes, piece.bytes - at));
            uint8_t* const from = loaded.arena(rank) + piece.begin + at;
            void* const lies = device::landing(from, buffers.chunk());
            if (lies == buffers.chunk()) device::download(lies, from, n);
            hash.add(lies, n);
            file.write(lies, n, data_begin + piece.begin + at);
            progress.bytes_done += n;
        }
        hashes[job] = hash.value();
    });
    const std::string header = header_of(loaded, rank, hashes);
    KD_CHECK(header.size() == data_begin);
    file.write(header.data(), header.size(), 0);
    file.finish();
}

}  // namespace

void save(const Loaded& loaded, const std::string& path, Progress& progress) {
    progress.start();
    progress.bytes_total = loaded.packing.bytes * loaded.ranks.size();
    progress.enter(KD_LOAD_READ);
    int rank = 0;
    try {
        for (; rank < static_cast<int>(loaded.ranks.size()); ++rank) save_rank(loaded, rank, path, progress);
    } catch (...) {
        while (rank-- > 0) unlink((path + "/" + packed_name(rank)).c_str());
        throw;
    }
}

}  // namespace kd::model
