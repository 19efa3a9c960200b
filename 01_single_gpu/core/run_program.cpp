// The frame of every main().
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/environment.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

void open_standard_streams() {
    for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != stream) std::_Exit(1);
}

int run_program(int argc, char** argv, const std::function<void(int, char**)>& body) {
    open_standard_streams();
    std::signal(SIGXFSZ, SIG_IGN);  // beyond ulimit -f a write fails, as on a full disk
    execute_with_settings(argv);
    const std::string program = program_name = std::filesystem::path(argv[0]).filename().string();
    const auto fail = [&](const std::string& why) {
        print_error_line(one_line(fmt::format("{}: rank {}: {}", program, this_rank, why)));
        end_all_ranks(1);
        return 1;
    };
    try {
        int exit_code = 0;
        try {
            body(argc, argv);
        } catch (const EarlyEnd& end) { exit_code = end.exit_code; }
        if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return exit_code;
        print_error_line(fmt::format("{}: standard output cannot be written ({})", program, std::strerror(errno)));
        return 1;
    } catch (const UsageError& error) {
        if (this_rank == 0) print_error_line(one_line(fmt::format("{}: {}", program, error.what())));
        return 2;
    } catch (const CommonError& error) {
        if (this_rank == 0) print_error_line(one_line(fmt::format("{}: {}", program, error.what())));
        return 1;
    } catch (const std::bad_alloc&) {
        return fail("out of host memory (try a smaller --micro-batch or --recompute full)");
    } catch (const std::exception& error) { return fail(error.what()); }
}

}  // namespace train70b
