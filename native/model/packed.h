// Packed folders: what each rank's memory holds once a model is loaded, as one safetensors file a rank, so that the next load
// reads and copies and computes nothing.
//
// packed-rank-<r>.safetensors has one U8 tensor for each part of the layout, in the layout's order, and in __metadata__ (text, all):
// format "kd-packed"; layout (kPackedLayout and device::weight_layout()), tp, rank, bytes, fingerprint, target_bytes and
// target_fingerprint (without the drafter): the layout, which must be this build's own; content_hash, target_hash, parameters, draft_parameters: as kd::model::Info, of the folder it was made
// from; config_hash, draft_config_hash: of the config texts, which lie beside it; hashes: XXH3 in 16 hexadecimal digits of each
// piece of kPieceBytes of each part, in order; header_hash: of all before the data, with zeros for these 16 digits.
// Every byte that is read is compared with these.
#pragma once

#include "model/files.h"
#include "model/load.h"
#include "model/readers.h"

namespace kd::model {

constexpr int kPackedLayout =
    3;  // raise it whenever plan.cpp puts something elsewhere, or these files change otherwise
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

std::string packed_name(int rank);  // of the file

// Whether the folder is a packed one, perhaps with files missing.
bool is_packed(const Folder& folder);
struct PackedAbout {
    // What the first rank's file says of itself.
    int tp = 0;
    std::string layout;
    bool draft = false;
    // By look_at_packed().
    Info info;  // counts of parameters and hashes
    uint64_t files = 0, file_bytes = 0, tensors = 0;
};
PackedAbout about_packed(const Folder& folder);
// What Packed refuses is refused, of files for another backend as far as it can be told without their layout. `packing`: this
// build's for as many ranks.
void look_at_packed(const Folder& folder, const Packing& packing, PackedAbout& about);

// An opened packed folder. What does not fit `packing`, which is this build's for the same configs, is refused (KD_E_MODEL).
// Without a draft_config_hash in it a drafter in the files is left out.
class Packed {
  public:
    Packed(const Folder& folder, const Packing& packing, int tp);
    const Info& info() const { return info_; }           // counts of parameters and hashes
    uint64_t read_bytes() const { return read_bytes_; }  // of all ranks
    void fill(Loaded& loaded, Progress& progress) const;

  private:
    struct Piece {
        int rank;
        uint64_t begin, bytes;  // in the rank's memory
        uint64_t hash;
        size_t part;
    };
    std::vector<std::unique_ptr<File>> files_;
    std::vector<uint64_t> data_begin_;
    std::vector<Piece> pieces_;
    std::vector<Layout::Part> parts_;
    Info info_;
    uint64_t read_bytes_ = 0;

    void open(const Folder& folder, const Packing& packing, int tp, int rank);
    void read(const Piece& piece, Loaded& loaded, Progress& progress, const Buffers& buffers, const Stop& stop) const;
};

// Writes the files of all ranks into the folder `path`, which exists and holds none of them. Binds the calling thread.
// progress: bytes written. Throws KD_E_IO, KD_E_CANCELLED; what was written is taken away again then.
void save(const Loaded& loaded, const std::string& path, Progress& progress);

}  // namespace kd::model
