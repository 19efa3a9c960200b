#include "01_single_gpu/core/check.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>

#include "01_single_gpu/core/cpu_setup.h"

namespace train70b {

std::string fill_in(std::string_view text, std::initializer_list<std::string> values) {
    std::string filled;
    auto value = values.begin();
    for (size_t i = 0; i < text.size(); ++i) {
        if (text.substr(i, 2) == "{}" && value != values.end()) {
            filled += *value++;
            ++i;
        } else {
            filled += text[i];
        }
    }
    return filled;
}

namespace {
// The number of bytes of the UTF-8 character at the beginning of a text; 0: there is none.
size_t utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const size_t length = byte(0) < 0x80 ? 1 : byte(0) < 0xc2 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
    if (length == 0 || byte(0) > 0xf4 || length > text.size()) return 0;
    uint32_t code = byte(0) & (0xff >> (length + (length > 1)));
    for (size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return 0;
        code = code << 6 | (byte(i) & 0x3f);
    }
    const bool too_long = (length == 3 && code < 0x800) || (length == 4 && (code < 0x10000 || code > 0x10ffff));
    const bool surrogate = code >= 0xd800 && code < 0xe000, control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    return too_long || surrogate || control ? 0 : length;
}
}  // namespace

std::string one_line(std::string_view message) {
    constexpr size_t kFirst = 1000, kLast = 500;
    std::string line;
    for (size_t i = 0; i < message.size();) {
        const size_t length = utf8_length(message.substr(i));
        if (length == 0) line += fmt::format("\\x{:02x}", static_cast<unsigned char>(message[i]));
        line += message.substr(i, length);
        i += std::max<size_t>(length, 1);
    }
    if (line.size() <= kFirst + kLast) return line;
    size_t first = kFirst, last = line.size() - kLast;  // not within a character
    while ((line[first] & 0xc0) == 0x80) --first;
    while ((line[last] & 0xc0) == 0x80) ++last;
    return line.substr(0, first) + " ... " + line.substr(last);
}

namespace {
void print_line(const std::string& line) {
    std::fflush(stdout);
    std::fputs((line + "\n").c_str(), stderr);
    std::fflush(stderr);
}
}  // namespace

void check_failed(const char* expression, const char* file, int line, const std::string& text) {
    print_line(fmt::format("rank {}: check failed: {}{}{} ({}:{})", this_rank, expression, text.empty() ? "" : ": ",
                           one_line(text), file, line));
    end_all_ranks(1);
    std::abort();
}

void open_standard_streams() {
    for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != stream) std::_Exit(1);
}

int run_program(int argc, char** argv, const std::function<void(int, char**)>& body) {
    open_standard_streams();
    restart_with_settings(argv);
    const std::string program = std::filesystem::path(argv[0]).filename().string();
    const auto fail = [&](const std::string& why) {
        print_line(one_line(fmt::format("{}: rank {}: {}", program, this_rank, why)));
        end_all_ranks(1);
        return 1;
    };
    try {
        int exit_code = 0;
        try {
            body(argc, argv);
        } catch (const EarlyEnd& end) { exit_code = end.exit_code; }
        if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return exit_code;
        print_line(fmt::format("{}: standard output cannot be written ({})", program, std::strerror(errno)));
        return 1;
    } catch (const UsageError& error) {
        if (this_rank == 0) print_line(one_line(fmt::format("{}: {}", program, error.what())));
        return 2;
    } catch (const CommonError& error) {
        if (this_rank == 0) print_line(one_line(fmt::format("{}: {}", program, error.what())));
        return 1;
    } catch (const std::bad_alloc&) {
        return fail("out of host memory (try a smaller --micro-batch or --recompute full)");
    } catch (const std::exception& error) { return fail(error.what()); }
}

}  // namespace train70b
