#pragma once
// How a run fails.
//   usage_error  invalid input: rank 0 prints one line that says what would work; exit code 2
//   CommonError  the run itself failed: rank 0 prints one line; exit code 1
//   CHECK        a broken invariant: prints rank, expression, values and file:line; all ranks end with exit code 1
#ifndef __CUDACC__  // nvcc's front end cannot compile fmt; the messages here only use {}
#include <fmt/core.h>
#endif

#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace train70b {

inline int this_rank = 0;                                // set by chapter 02 after MPI_Init
inline std::function<void(int exit_code)> end_all_ranks  // chapter 02: MPI_Abort
    = [](int exit_code) { std::_Exit(exit_code); };

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The number of bytes of the UTF-8 character at the beginning of a text; 0: there is none, or a control character.
size_t utf8_length(std::string_view text);
// The message as one line of at most 1,500 bytes: control characters and bytes that are not UTF-8, as file names may
// have, are escaped; the middle of a longer text is left out.
std::string one_line(std::string_view message);

// An error that all ranks have found together, in the same call: rank 0 prints it, all end with exit code 1.
struct CommonError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct EarlyEnd {  // thrown, on all ranks, when nothing is left to do, as after --help
    int exit_code = 0;
};

// Returns the text with each {} replaced by the next value.
std::string fill_in(std::string_view text, std::initializer_list<std::string> values);

template <class... Args>
std::string describe(std::string_view text, const Args&... args) {
    [[maybe_unused]] const auto as_text = [](const auto& value) {
        std::ostringstream out;
        out << value;
        return out.str();
    };
    return fill_in(text, {as_text(args)...});
}
inline std::string describe() { return {}; }

template <class... Args>
[[noreturn]] void usage_error(std::string_view text, const Args&... args) {
    throw UsageError(describe(text, args...));
}

// Prints "rank R: check failed: EXPRESSION: TEXT (FILE:LINE)" and ends all ranks with exit code 1.
[[noreturn]] void check_failed(const char* expression, const char* file, int line, const std::string& text);

#define CHECK(condition, ...)                                                                            \
    do {                                                                                                 \
        if (!(condition)) [[unlikely]]                                                                   \
            ::train70b::check_failed(#condition, __FILE__, __LINE__, ::train70b::describe(__VA_ARGS__)); \
    } while (0)

void print_error_line(const std::string& line);  // on standard error, behind what standard output has

// Opens /dev/null for each standard stream that the caller closed: the next file opened would take its place.
void open_standard_streams();

// The frame of every main(): runs the body and maps its exceptions to the exit codes above. Exit code 1 also if
// standard output could not be written.
int run_program(int argc, char** argv, const std::function<void(int, char**)>& body);

}  // namespace train70b
