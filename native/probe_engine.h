// The one friend that an engine has: breaks and watches it for tests and benches.
#pragma once

#include <functional>

#include "engine/handle.h"

namespace kd {

enum class Fault { exception, device, segfault, hang };

struct EngineProbe {
    // In the next turn rank `rank` breaks in the second of two passes, while the others wait for it in a collective.
    static void break_rank(Engine& e, int rank, Fault fault);
    // Rounds that may follow one another before the engine looks.
    static void rounds_at_once(Engine& e, int rounds);
    // The engine thread does nothing, from when *go is -1 until it is something else.
    static void freeze(Engine& e, volatile int* go);

    // Polls the stream of slot 0 just when it sits out for its unpolled events, `times` times or until it ends; false if after a
    // poll nothing came for two seconds, though there was room.
    static bool poll_when_full(Engine& e, int times);

    static int ranks(const Engine& e) { return e.options_.tp; }
    static Shape shape(Engine& e);  // of rank 0
    // body(rank) on the thread of every rank, between two steps. What it throws is thrown here and leaves the engine as it is.
    static void on_ranks(Engine& e, const std::function<void(Rank&)>& body);
};

}  // namespace kd
