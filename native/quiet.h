// Signals belong to the program we are embedded in: none is delivered to a thread of ours. A thread inherits what is blocked
// where it is started.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kd {

// While this lives the calling thread gets no signal but those that its own faults raise: blocked, they would end the process
// before the program's handler could say where.
class Quiet {
  public:
    Quiet() {
        sigset_t others;
        sigfillset(&others);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&others, own);
        pthread_sigmask(SIG_SETMASK, &others, &before_);
    }
    ~Quiet() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    Quiet(const Quiet&) = delete;

  private:
    sigset_t before_;
};

}  // namespace kd
