#include "01_single_gpu/core/say.h"

#include <unistd.h>

#include "01_single_gpu/core/launcher.h"

namespace train70b {

bool is_on_terminal() { return ::isatty(STDOUT_FILENO) == 1 && !is_under_mpirun(); }

void warn(const std::string& text) {
    if (is_on_terminal()) std::fputs("\n", stdout);  // behind a progress line
    print_error_line(one_line(fmt::format("{}: {}", program_name, text)));
}

std::string human_bytes(double bytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
    return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string human_count(double count) {
    const char* units[] = {"", "k", "M", "G", "T"};
    int unit = 0;
    while (count >= 1000 && unit < 4) count /= 1000, ++unit;
    return fmt::format("{:.{}f}{}", count, unit == 0 ? 0 : 1, units[unit]);
}

}  // namespace train70b
