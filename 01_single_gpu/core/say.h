#pragma once
// What a program prints.
#include <cstdio>
#include <string>

#include "01_single_gpu/core/check.h"

namespace train70b {

// Suppresses say() and progress lines for its lifetime: for runs that only measure.
class Quiet {
  public:
    Quiet() { ++count_; }
    ~Quiet() { --count_; }
    Quiet(const Quiet&) = delete;
    static bool on() { return count_ > 0; }

  private:
    static inline int count_ = 0;
};

// Prints on rank 0 only.
template <class... Args>
void say(fmt::format_string<Args...> text, Args&&... args) {
    if (this_rank != 0 || Quiet::on()) return;
    std::fputs(fmt::format(text, std::forward<Args>(args)...).c_str(), stdout);  // run_program checks stdout at the end
    std::fflush(stdout);
}

inline std::string program_name;  // set by run_program
// Prints "PROGRAM: text" on standard error, and the run goes on.
void warn(const std::string& text);

bool is_on_terminal();  // standard output: a line there may be written again

std::string human_bytes(double bytes);  // "36.2 MiB"
std::string human_count(double count);  // "28.1k"

}  // namespace train70b
