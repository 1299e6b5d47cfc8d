#include "tree/registry.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "error.h"
#include "structs.h"

namespace kd::tree {
namespace {

constexpr const kd_tree_builder* kBuiltIn[] = {&none, &chain, &heap, &device};
constexpr int kDefaultHeapBudget = 8;
constexpr size_t kMaxName = sizeof(kd_builder_info::name) - 1;
constexpr size_t kMaxDescription = sizeof(kd_builder_info::description) - 1;

}  // namespace

int default_budget(std::string_view name, int draft_depth) {
    if (name == none.name) return 0;
    if (name == chain.name) return std::clamp(draft_depth, 0, KD_MAX_DEPTH);
    return kDefaultHeapBudget;
}

// ---- builders -------------------------------------------------------------------------------------------------------

Builder::Builder(const kd_tree_builder& from)
    : name(from.name), description(from.description ? from.description : ""), functions(from) {
    functions.size = sizeof functions;
    functions.name = name.c_str();
    functions.description = description.c_str();
}

bool Builder::needs_drafter() const { return name != none.name; }
bool Builder::on_device() const { return name == none.name || name == chain.name || name == device.name; }

int Builder::width(int budget) const { return name == chain.name ? std::min(budget, 1) : budget; }

Instance::Instance(const Builder& builder, int max_nodes) : self_(builder.functions.create(max_nodes)) {
    if (!self_) fail(KD_E_BUILDER, "builder %s could not be created for %d nodes", builder.name.c_str(), max_nodes);
    builder_ = &builder;
}

Instance::Instance(Instance&& from) noexcept
    : builder_(std::exchange(from.builder_, nullptr)), self_(std::exchange(from.self_, nullptr)) {}

Instance& Instance::operator=(Instance&& from) noexcept {
    std::swap(builder_, from.builder_);
    std::swap(self_, from.self_);
    return *this;
}

Instance::~Instance() {
    if (builder_) builder_->functions.destroy(self_);
}

bool valid_name(std::string_view name) {
    return !name.empty() && name.size() <= kMaxName &&
           name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string_view::npos;
}

Registry::Registry() {
    for (const kd_tree_builder* builder : kBuiltIn) insert(*builder);
}

const Builder& Registry::add(const kd_tree_builder* builder) {
    if (!builder) fail(KD_E_INVALID, "builder is NULL: pass a kd_tree_builder");
    check_input(builder, "kd_tree_builder");
    if (builder->abi != KD_BUILDER_ABI) {
        fail(KD_E_INVALID, "builder has ABI %u, this library takes %d: compile it against this kd.h", builder->abi,
             KD_BUILDER_ABI);
    }
    if (!builder->name || !valid_name({builder->name, strnlen(builder->name, kMaxName + 1)})) {
        fail(KD_E_INVALID, "a builder's name must be 1 to %zu characters of [a-z0-9_-]", kMaxName);
    }
    if (!builder->create || !builder->build || !builder->destroy) {
        fail(KD_E_INVALID, "builder %s: create, build and destroy must not be NULL", builder->name);
    }
    if (builder->description && strnlen(builder->description, kMaxDescription + 1) > kMaxDescription) {
        fail(KD_E_INVALID, "builder %s: the description is longer than %zu bytes", builder->name, kMaxDescription);
    }
    return insert(*builder);
}

const Builder& Registry::insert(const kd_tree_builder& builder) {
    std::lock_guard lock(mutex_);
    for (const Builder& known : builders_) {
        if (known.name == builder.name) fail(KD_E_EXISTS, "a builder named %s is registered already", builder.name);
    }
    if (builders_.size() >= KD_MAX_BUILDERS) {
        fail(KD_E_NOMEM, "builder %s: %d builders are registered, there is no room for more", builder.name,
             KD_MAX_BUILDERS);
    }
    return builders_.emplace_back(builder);
}

const Builder* Registry::find(std::string_view name) const {
    std::lock_guard lock(mutex_);
    for (const Builder& builder : builders_) {
        if (builder.name == name) return &builder;
    }
    return nullptr;
}

const Builder& Registry::get(const char* name) const {
    if (!name) fail(KD_E_INVALID, "the builder's name is NULL");
    const std::string_view wanted(name, strnlen(name, kMaxName + 1));
    if (const Builder* builder = find(wanted)) return *builder;
    std::string known;
    for (const Builder* builder : list()) known += (known.empty() ? "" : ", ") + builder->name;
    fail(KD_E_NOT_FOUND, "no builder is named '%.*s'; the builders are %s", static_cast<int>(wanted.size()),
         wanted.data(), known.c_str());
}

std::vector<const Builder*> Registry::list() const {
    std::lock_guard lock(mutex_);
    std::vector<const Builder*> all;
    for (const Builder& builder : builders_) all.push_back(&builder);
    return all;
}

// ---- trees ----------------------------------------------------------------------------------------------------------

const char* check_tree(const kd_tree_in& in, const kd_tree_out& out, int vocab, int max_depth) {
    if (out.n < 0 || out.n > in.budget || out.n > KD_MAX_NODES) return "its number of nodes is not in 0..budget";
    const int deepest = std::min(in.depths, max_depth);
    uint8_t depth[KD_MAX_NODES + 1];
    depth[0] = 0;
    // Open addressing over (parent, token): at most a quarter full, so that few steps find a free place.
    constexpr uint32_t places = 4 * KD_MAX_NODES;
    uint16_t node_at[places] = {};
    for (int i = 1; i <= out.n; i++) {
        const int32_t parent = out.parent[i - 1], token = out.token[i - 1];
        if (parent < 0 || parent >= i) return "a node's parent does not come before it";
        if (depth[parent] >= deepest) return "a node lies deeper than the table or the limit";
        depth[i] = static_cast<uint8_t>(depth[parent] + 1);
        if (token < 0 || token >= vocab) return "a token is not in the vocabulary";
        uint32_t place =
            (static_cast<uint32_t>(token) * 0x9E3779B1u ^ static_cast<uint32_t>(parent) * 0x85EBCA77u) >> 16;
        for (place %= places; node_at[place] != 0; place = (place + 1) % places) {
            const int other = node_at[place];
            if (out.parent[other - 1] == parent && out.token[other - 1] == token) {
                return "two children of one node have the same token";
            }
        }
        node_at[place] = static_cast<uint16_t>(i);
    }
    return nullptr;
}

void node_gains(double* gain, const kd_tree_in& in, const kd_tree_out& out) {
    uint8_t depth[KD_MAX_NODES + 1];
    depth[0] = 0;
    for (int i = 0; i < out.n; i++) {
        const int parent = out.parent[i];
        const int d = depth[parent];  // of the parent: the row of the table this node's token stands in
        depth[i + 1] = static_cast<uint8_t>(d + 1);
        const int32_t* row = in.token + static_cast<size_t>(d) * in.width;
        const int32_t* at = d < in.depths ? std::find(row, row + in.width, out.token[i]) : row + in.width;
        const double own = at < row + in.width ? std::exp(static_cast<double>(in.logprob[at - in.token])) : 0;
        gain[i] = (parent == 0 ? 1 : gain[parent - 1]) * own;
        if (gain[i] != gain[i]) gain[i] = 0;  // a NaN would have no order
    }
}

int cut_trees(const Planted* trees, int n_streams, int max_rows) {
    KD_CHECK(n_streams >= 0 && n_streams <= KD_MAX_STREAMS);
    int rows = 0;
    for (int s = 0; s < n_streams; s++) rows += trees[s].out->n + 1;
    if (rows <= max_rows) return rows;

    double gain[KD_MAX_STREAMS][KD_MAX_NODES];
    for (int s = 0; s < n_streams; s++) node_gains(gain[s], *trees[s].in, *trees[s].out);
    while (rows > max_rows) {
        int least = -1;
        for (int s = 0; s < n_streams; s++) {
            const int n = trees[s].out->n;
            if (n == 0) continue;
            if (least < 0 || gain[s][n - 1] <= gain[least][trees[least].out->n - 1]) least = s;
        }
        if (least < 0) break;
        trees[least].out->n--;
        rows--;
    }
    return rows;
}

// ---- offline --------------------------------------------------------------------------------------------------------

void build_offline(const char* name, const kd_tree_in* in, kd_tree_out* out) {
    if (!name || !in || !out) fail(KD_E_INVALID, "kd_builder_build: name, in and out must not be NULL");
    check_input(in, "kd_tree_in");
    check_input(out, "kd_tree_out");
    const kd_tree_builder* builder = nullptr;
    for (const kd_tree_builder* known : kBuiltIn) {
        if (!std::strcmp(known->name, name)) builder = known;
    }
    if (!builder)
        fail(KD_E_NOT_FOUND, "kd_builder_build: no built-in builder is named %.40s: none, chain or heap", name);
    if (in->depths < 0 || in->depths > KD_MAX_TABLE_DEPTH) {
        fail(KD_E_INVALID, "kd_builder_build: depths is %d, must be 0..%d", in->depths, KD_MAX_TABLE_DEPTH);
    }
    if (in->budget < 0 || in->budget > KD_MAX_NODES) {
        fail(KD_E_INVALID, "kd_builder_build: budget is %d, must be 0..%d", in->budget, KD_MAX_NODES);
    }
    if (in->depths > 0 && (in->width < 1 || !in->token || !in->logprob)) {
        fail(KD_E_INVALID, "kd_builder_build: a table of %d depths needs width >= 1, token and logprob", in->depths);
    }
    if (in->budget > 0 && (!out->token || !out->parent)) {
        fail(KD_E_INVALID, "kd_builder_build: out needs token and parent with room for %d nodes", in->budget);
    }
    for (int d = 0; d < in->depths; d++) {
        const float* row = in->logprob + static_cast<size_t>(d) * in->width;
        for (int i = 0; i < in->width; i++) {
            if (!(row[i] <= (i > 0 ? row[i - 1] : std::numeric_limits<float>::infinity()))) {
                fail(KD_E_INVALID, "kd_builder_build: logprob of depth %d, place %d is not a number or rises", d + 1,
                     i);
            }
        }
    }

    void* self = builder->create(in->budget);
    if (!self) fail(KD_E_NOMEM, "kd_builder_build: no memory for a tree of %d nodes", in->budget);
    const int status = builder->build(self, in, out);
    builder->destroy(self);
    if (status != KD_OK) fail(KD_E_BUILDER, "kd_builder_build: builder %s failed with %d", name, status);
    if (const char* problem = check_tree(*in, *out, std::numeric_limits<int32_t>::max(), KD_MAX_TABLE_DEPTH)) {
        fail(KD_E_INVALID, "kd_builder_build: this table gives no tree: %s", problem);
    }
}

}  // namespace kd::tree
