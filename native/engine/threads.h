#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

#include "quiet.h"

namespace kd {

// A thread that takes no signals: they belong to the program we are embedded in. `name` is what `top -H` shows, at most
// 15 characters.
template <class F>
std::thread quiet_thread(std::string name, F&& body) {
    const Quiet quiet;
    return std::thread([name = std::move(name), body = std::forward<F>(body)]() mutable {
        pthread_setname_np(pthread_self(), name.c_str());
        body();
    });
}

}  // namespace kd
