// What every rank is at (kd_step_record of kd.h), in memory that outlives the process if it is a file's.
#pragma once

#include <string>

#include "kd.h"

namespace kd {

class StepRecord {
  public:
    // In a file made at `path`, or with an empty one only in memory. Throws Error(KD_E_IO).
    StepRecord(std::string path, int tp);
    ~StepRecord();  // removes the file: nothing is left to tell
    StepRecord(const StepRecord&) = delete;

    kd_rank_record* ranks() { return record_->ranks; }
    // The calling thread works for `rank` from now on, or, with KD_STAGE_IDLE, does no longer.
    void enter(int rank, uint64_t step, kd_stage stage);

    // In the records of this process: the calling thread got a signal. Safe in a signal handler.
    static void note_signal(int signal);

  private:
    const std::string path_;
    kd_step_record* record_ = nullptr;
};

const char* stage_name(kd_stage stage);

}  // namespace kd
