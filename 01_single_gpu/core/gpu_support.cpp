#include "01_single_gpu/core/gpu_support.h"

#include <charconv>

#include "01_single_gpu/core/check.h"

namespace train70b {

// Of one architecture; true for a word that names none (all, native): CUDA itself then says what is missing.
static bool runs(std::string_view word, int major, int minor) {
    int number = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc()) return true;
    const std::string_view rest(stop, size_t(word.data() + word.size() - stop));
    const bool exact = rest.starts_with("a"), family = rest.starts_with("f");
    const int gpu = 10 * major + minor;
    if (exact) return gpu == number;
    const bool machine_code = !rest.ends_with("-virtual"), ptx = !rest.ends_with("-real");
    return gpu >= number && (number / 10 == major ? machine_code || ptx : ptx && !family);
}

std::string no_code_for(std::string_view architectures, int major, int minor) {
    for (size_t begin = 0; begin < architectures.size();) {
        const size_t end = std::min(architectures.find(',', begin), architectures.size());
        if (runs(architectures.substr(begin, end - begin), major, minor)) return "";
        begin = end + 1;
    }
    const std::string can = 10 * major + minor < 80
                                ? "the kernels need 8.0 or later: bf16 on tensor cores"
                                : fmt::format("configure with -DTRAIN70B_CUDA_ARCH={}{}", major, minor);
    return fmt::format("this build has code for {}, not for a GPU of compute capability {}.{} ({})", architectures,
                       major, minor, can);
}

std::string fp8_recipes_of(int major, int minor) {
    if (10 * major + minor < 89) return "none";
    return major == 9 ? "current, delayed, rowwise, blockwise" : "current, delayed";
}

std::string driver_too_old(int driver, int runtime) {
    if (driver >= runtime - runtime % 1000) return "";
    const int needed = runtime / 1000;
    const char* const least = needed == 13 ? "580" : needed == 12 ? "525" : "";
    return fmt::format(
        "the NVIDIA driver knows CUDA up to {}.{}, and this build needs CUDA {}{} (install a newer driver)",
        driver / 1000, driver % 1000 / 10, needed,
        *least ? fmt::format(", which needs driver {} or later", least) : "");
}

}  // namespace train70b
