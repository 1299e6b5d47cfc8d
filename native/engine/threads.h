#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace kd {

// A thread that takes no signals: they belong to the program we are embedded in. `name` is what `top -H` shows, at most
// 15 characters.
template <class F>
std::thread quiet_thread(const char* name, F&& body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct Restore {
        const sigset_t& mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
    } restore{before};
    return std::thread([name, body = std::forward<F>(body)]() mutable {
        pthread_setname_np(pthread_self(), name);
        body();
    });
}

}  // namespace kd
