#pragma once
// How far a long computation is.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

#include "01_single_gpu/core/check.h"

namespace train70b {

// On stderr: on a terminal one line that is written again and again, else a line every ten seconds.
class ProgressLine {
  public:
    ~ProgressLine() { clear(); }
    void show(const char* what, double part) {
        const auto now = std::chrono::steady_clock::now();
        if (now < next_) return;
        next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
        std::fputs(
            fmt::format("{}plan: {}: {:.0f}%{}", terminal_ ? "\r\033[K" : "", what, 100 * part, terminal_ ? "" : "\n")
                .c_str(),
            stderr);
        shown_ = terminal_;
    }
    void clear() {
        if (std::exchange(shown_, false)) std::fputs("\r\033[K", stderr);
    }

  private:
    const bool terminal_ = isatty(STDERR_FILENO) == 1;
    bool shown_ = false;
    std::chrono::steady_clock::time_point next_ =
        std::chrono::steady_clock::now() + (terminal_ ? std::chrono::milliseconds(500) : std::chrono::seconds(10));
};

}  // namespace train70b
