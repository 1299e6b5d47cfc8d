// The files of a model folder: opened once, relative to the opened folder, regular files only, read with pread.
//
// A symbolic link is not followed, except the one that Hugging Face's download cache is made of, a link to
// ../../blobs/<hexadecimal name>, unless one asks for it. Errors name path, reason and, where it matters, the user.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/safetensors.h"

namespace kd::model {

class File {
  public:
    File(int fd, std::string path, uint64_t bytes) : path(std::move(path)), bytes(bytes), fd_(fd) {}
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Exactly `n` bytes from `offset`. `what` stands in the sentence if the file ends early.
    void read(void* to, size_t n, uint64_t offset, const std::string& what) const;

    // These bytes are read next: the system may begin with it. Only a hint.
    void expect(uint64_t offset, uint64_t n) const;

    const std::string path;
    const uint64_t bytes;  // when it was opened

  private:
    int fd_;
};

enum class Links { kCache, kFollow };  // which symbolic links are followed

class Folder {
  public:
    // KD_E_IO, which calls it what it is.
    explicit Folder(const std::string& path, Links links = Links::kCache, const std::string& what = "folder");
    Folder(const Folder& parent,
           const std::string& name);  // KD_E_MODEL if it is a link or no folder; links as the parent
    ~Folder();
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    bool has(const std::string& name) const;  // anything of that name
    std::vector<std::string> shards() const;  // names like model-00001-of-00003.safetensors, sorted; KD_E_IO
    // KD_E_MODEL if there is no such file, or it is no regular file; KD_E_IO if it cannot be opened.
    std::unique_ptr<File> open(const std::string& name) const;
    std::string read_text(const std::string& name, size_t max_bytes) const;
    std::string path_of(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }
    Links links() const { return links_; }

  private:
    std::string path_;
    Links links_;
    int fd_ = -1;
};

safetensors::Header read_header(const File& file);

// Every tensor of a folder, by name.
struct Checkpoint {
    struct Found {
        size_t file;
        const safetensors::Tensor* tensor;
        bool used = false;
    };
    std::vector<std::unique_ptr<File>> files;
    std::vector<safetensors::Header> headers;
    std::unordered_map<std::string_view, Found> tensors;  // names live in headers
};

// Whether the folder holds an index or a single file of weights.
bool has_weights(const Folder& folder);

// Opens all files and reads their headers; `pause` is called between two of them and may throw.
Checkpoint open_checkpoint(const Folder& folder, const std::function<void()>& pause);

}  // namespace kd::model
