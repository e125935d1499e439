// Where the time of a step goes, by what is done. Costs a comparison where nobody asks.
#pragma once

#include <chrono>

// kRows: making rows (sums, norms, gates) and quantising them. kQkv to kHead: products of those layers. kWrite: rotary
// positions and writing pages. Python has the same order (stack.py).
enum Phase : int { kRows = 0, kQkv, kOut, kGateUp, kDown, kHead, kWrite, kAttention };

class PhaseClock {
  public:
    // seconds: by phase, added to; or null.
    explicit PhaseClock(double* seconds) : seconds_(seconds) {
        if (seconds_ != nullptr) last_ = Clock::now();
    }

    // What went by since the last call was `phase`.
    void lap(Phase phase) {
        if (seconds_ == nullptr) return;
        const Clock::time_point now = Clock::now();
        seconds_[phase] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

  private:
    using Clock = std::chrono::steady_clock;
    double* seconds_;
    Clock::time_point last_;
};
