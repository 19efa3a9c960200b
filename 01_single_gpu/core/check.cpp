#include "01_single_gpu/core/check.h"

#include <cstdio>
#include <cstdlib>
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

void check_failed(const char* expression, const char* file, int line, const std::string& text) {
    std::fflush(stdout);
    fmt::print(stderr, "rank {}: check failed: {}{}{} ({}:{})\n", this_rank, expression, text.empty() ? "" : ": ", text,
               file, line);
    std::fflush(stderr);
    end_all_ranks(1);
    std::abort();
}

int run_program(int argc, char** argv, const std::function<void(int, char**)>& body) {
    restart_with_settings(argv);
    const std::string program = std::filesystem::path(argv[0]).filename().string();
    try {
        body(argc, argv);
        return 0;
    } catch (const EarlyEnd& end) { return end.exit_code; } catch (const UsageError& error) {
        std::fflush(stdout);
        if (this_rank == 0) fmt::print(stderr, "{}: {}\n", program, error.what());
        return 2;
    } catch (const CommonError& error) {
        std::fflush(stdout);
        if (this_rank == 0) fmt::print(stderr, "{}: {}\n", program, error.what());
        return 1;
    } catch (const std::bad_alloc&) {
        std::fflush(stdout);
        fmt::print(stderr, "{}: rank {}: out of host memory (try a smaller --micro-batch or --recompute full)\n",
                   program, this_rank);
        end_all_ranks(1);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        fmt::print(stderr, "{}: rank {}: {}\n", program, this_rank, error.what());
        end_all_ranks(1);
    }
    return 1;
}

}  // namespace train70b
