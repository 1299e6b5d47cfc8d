// The engine: one thread that admits requests, runs prefill steps and decode rounds, and emits events.
//
// Everything a request is lives on the engine thread. Other threads reach it through the inbox: post() leaves a command,
// call() leaves one and waits for it; both are carried out between two steps. What other threads read directly (state, info,
// counters) is copied under small locks once a turn.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/event_ring.h"
#include "engine/kv_cache.h"
#include "engine/request.h"
#include "engine/team.h"
#include "model/load.h"
#include "round.h"
#include "tree/registry.h"

namespace kd {

// kd_options with the defaults filled in and checked.
struct Options {
    int tp = 1, threads = 0, isa = KD_ISA_AUTO;
    int max_streams = KD_MAX_STREAMS, max_queue = 512, max_rows = device::most_rows(), max_nodes = 64,
        prefill_chunk = 256;
    bool prefix_cache = true, share_devices = false;
    uint64_t kv_bytes = uint64_t(128) << 20;
    uint32_t slow_reader_timeout_ms = 30000;
    std::string record_path;  // empty: none
};

// A model in place: weights, the ranks' buffers, the page accounts. Destroyed between two steps.
struct Resident {
    std::unique_ptr<model::Loaded> loaded;
    std::unique_ptr<Stage> stage;
    std::unique_ptr<KvCache> cache;
    TokenBytes token_bytes;
    kd_model_info info{};
    const tree::Builder* builder = nullptr;  // in force from when it takes its place; nullptr: see plant_default()
    int budget = 0;
};

// The options of kd_load, copied.
struct LoadPlan {
    std::string path;
    model::DraftChoice draft;
    TokenBytes token_bytes;
    model::Links links = model::Links::kCache;
    bool replace = false, hold = false;
    uint64_t text_id = 0;
};

// What a request on a held model gave.
struct Trial {
    std::vector<int32_t> tokens;
    std::vector<uint64_t> hashes;  // of the tokens, if the request asks for them
    uint64_t decode_us = 0;        // from the first token to the last
};

class Engine {
  public:
    static constexpr int kUnpolledLoads = 32;  // ends of loads kept for kd_poll

    explicit Engine(const Options& options);
    ~Engine();

    // All [any] unless noted; they throw Error. Once latched, stats() and poll() still work: what happened can be read.
    void load(LoadPlan plan);
    void save(std::string path);
    void load_wait(uint32_t timeout_ms);
    void load_cancel();
    kd_progress load_progress();
    kd_model_info load_info();
    Trial load_try(std::unique_ptr<Request> request);
    void load_accept(const char* builder, int budget);
    uint64_t unload();
    void drain(bool on);
    kd_model_info info();
    kd_stats stats();
    uint64_t submit(std::unique_ptr<Request> request);
    void cancel(uint64_t id);
    void credit(uint64_t id, uint32_t events);
    void score(const int32_t* tokens, uint32_t n, float* logits);
    int poll(char* events, uint32_t stride, uint32_t capacity, uint32_t timeout_ms);  // [poller]
    int event_fd() const { return ring_.fd(); }
    void register_builder(const kd_tree_builder* builder);
    std::vector<kd_builder_info> builders();
    uint64_t use_builder(const char* name, int budget, uint64_t id);
    bool has_token_bytes() const { return token_bytes_; }
    void check_process() const;  // throws KD_E_FORKED in a child process
    void check_alive() const;    // throws KD_E_FATAL once latched

  private:
    friend struct EngineProbe;  // native/probe_engine.cpp: breaks things for tests
    using Requests = std::deque<std::unique_ptr<Request>>;
    struct Score {
        Sequence sequence;
        float* out = nullptr;
        int done = 0;
        uint64_t weights_generation = 0;
        std::promise<void> end;
    };
    // Who an event is counted for in the ring: a stream slot, or one of these behind them.
    int queue_place() const { return options_.max_streams; }
    int load_place() const { return options_.max_streams + 1; }

    device::Options device_options() const {
        return {.tp = options_.tp,
                .threads = options_.threads,
                .isa = options_.isa,
                .share_devices = options_.share_devices};
    }
    void check_request(const Request& request, const kd_model_info& model) const;
    void check_builder(const tree::Builder& builder, int budget, bool drafter) const;

    // inbox (engine.cpp)
    void post(std::function<void()> command);  // drops it once the engine thread has ended
    // Runs `body` on the engine thread; its result, or what it threw.
    template <class F>
    std::invoke_result_t<F> call(F&& body) {
        std::packaged_task<std::invoke_result_t<F>()> task(std::forward<F>(body));
        std::future<std::invoke_result_t<F>> result = task.get_future();
        post([&task] { task(); });  // `task` outlives it: get() waits
        return result.get();
    }

    // What load_try() waits for.
    struct Asked {
        Request& request;
        Trial trial;
        std::exception_ptr error;
    };

    // Events that a request may produce beyond its credit. Not a command: a run need not stop for it.
    struct Grant {
        uint64_t id = 0;
        uint32_t events = 0;
    };

    // the engine thread (scheduler.cpp)
    void measure();  // what ranks choose by measuring; before anything else
    void serve();
    bool turn();  // false: there was nothing to do
    void wait(uint64_t polled);
    void drain_inbox();
    bool take_grants();  // true: a request that had no credit has some again
    void admit();
    bool admit_one(Request& request, int slot);
    bool prefill();
    bool decode();
    int after_round(const StepCounts& step);
    int rounds_ahead() const;
    bool score_some();
    bool may_produce(const Request& request) const;
    void expire_slow_readers();
    uint64_t next_deadline_us() const;
    void emit(Request& request);
    void end(Request& request, int status);
    bool close_request(uint64_t id);  // it ends now; whether somebody was told that it ends as cancelled
    void push(Request& request, int type, int finish, int status, int n_tokens, std::string_view text);
    void show();
    void retire();
    void end_all(int status);
    void latch(const std::string& sentence);
    void publish_stats();
    Request* find(uint64_t id);
    int pages_for(const Sequence& q) const;

    // builders (builders.cpp)
    int budget_of(const tree::Builder& builder, int budget, const Model& model) const;
    Planting planting(const Model& model, const char* name, int budget, uint64_t generation);
    Planting plant_default(const Resident& resident);

    // loading (loading.cpp)
    void begin_load(const std::string& path, std::function<void()> body);
    std::unique_ptr<Resident> make_resident(LoadPlan& plan, uint64_t generation, Team& team, bool beside);
    void cancel_load();
    void pass_cancelling();
    void hold(Resident& resident);
    void release_held();
    Trial decode_alone(Resident& resident, Request& request);
    Resident& held() const;
    void install(std::shared_ptr<Resident> resident);
    bool swap_if_idle();
    void take_over(int status, const std::string& sentence);
    void settle_in(Request& request);
    void finish_load(int status, const std::string& sentence);

    const Options options_;
    const pid_t pid_;
    EventRing ring_;
    Team team_;
    tree::Registry registry_;

    // engine thread only
    std::shared_ptr<Resident> resident_;
    std::shared_ptr<Resident> next_;  // takes resident_'s place once the requests of that have ended
    uint64_t oldest_generation_ = 1;  // of a request that may run on a model that replaced its own
    Requests waiting_, running_;      // running_ includes prefilling ones, in order of admission
    std::deque<std::unique_ptr<Score>> scores_;
    std::vector<bool> slot_used_;
    std::unordered_map<const tree::Builder*, tree::Instance> instances_;
    Planting default_planting_;
    const tree::Builder* chosen_builder_ = nullptr;  // by kd_builder_use: kept over a reload
    int chosen_budget_ = 0;
    uint64_t awaited_generation_ = 0;  // of one chosen while there was no model; 0: there was one
    bool stop_ = false;
    kd_stats counters_{};
    std::vector<Request*> batch_;
    std::vector<Sequence*> sequences_;  // of batch_
    std::vector<PromptPart> parts_;

    // shared
    std::mutex inbox_mutex_;
    std::condition_variable inbox_wake_;
    std::vector<std::function<void()>> inbox_;
    std::vector<Grant> grants_;
    std::unordered_map<uint64_t, bool> open_;  // requests that have not ended -> whether they are to end as cancelled
    std::atomic<bool> wanted_{false};          // there are commands: a run of rounds is to end
    bool inbox_closed_ = false;
    std::atomic<bool> asleep_{false};  // the engine thread is, or is about to be
    std::atomic<uint64_t> polled_{0};  // calls of poll() that took events
    std::atomic<uint64_t> next_id_{1};
    std::atomic<uint64_t> builder_generation_{0};
    std::atomic<int> queued_{0};  // submitted, neither admitted nor ended
    std::atomic<bool> draining_{false};
    std::atomic<bool> fatal_{false};
    std::atomic<bool> token_bytes_{false};  // the loaded model came with its vocabulary's bytes

    mutable std::mutex state_mutex_;
    std::condition_variable state_changed_;
    std::string fatal_sentence_;
    int state_ = KD_STATE_EMPTY;
    kd_model_info info_{};
    kd_stats stats_{};
    bool loading_ = false;
    int load_status_ = KD_E_STATE;
    std::string load_sentence_ = "no load was started";
    uint64_t weights_generation_ = 0;
    std::unique_ptr<model::Progress> progress_;
    std::thread loader_;
    bool taken_ = false;                  // the load can no longer be cancelled
    std::atomic<bool> cancelled_{false};  // it is: a run of rounds on a held model is to end
    Resident* held_ = nullptr;            // the loader's, from KD_LOAD_WARM until it is installed or gone
    bool accepted_ = false;               // by load_accept
    Asked* asked_ = nullptr;              // for the loader to decode

    std::thread thread_;  // last: it uses all of the above
};

}  // namespace kd
