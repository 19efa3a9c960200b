#include "01_single_gpu/ops/matmul_autotune.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/say.h"

namespace train70b {
namespace {

std::string flag() { return "--matmul-autotune " + matmul_autotune; }

std::string tuned_on() { return fmt::format("{}, cuBLASLt {}", cuda_info().name, cuda_info().cublaslt); }

void append_tuned(const std::string& line) {  // in one write at the end, wherever that is by then
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(matmul_autotune.c_str(), "a"), std::fclose);
    if (!file || std::fputs(line.c_str(), file.get()) < 0 || std::fflush(file.get()) != 0)
        usage_error("{}: cannot be written ({}; try another file)", flag(), std::strerror(errno));
}

}  // namespace

std::optional<AlgorithmWords> tuned_algorithm(const std::string& product) {
    append_tuned("");  // now there is a file
    const InputFile file(flag(), matmul_autotune, "must be a regular file");
    std::string text(size_t(file.bytes()), ' '), found;
    file.read(0, text.data(), file.bytes());
    std::istringstream lines(text);
    const std::string here = tuned_on();
    int64_t number = 1;
    for (std::string line; std::getline(lines, line); ++number) {
        const size_t first = line.find("; "), last = line.rfind("; ");
        const bool whole = !lines.eof() && first < last && last + 2 + 128 == line.size() &&
                           line.find_first_not_of("0123456789abcdef", last + 2) == line.npos;
        if (!whole) usage_error("{}: line {} is no product's (try a file that does not exist)", flag(), number);
        if (line.substr(0, first) != here)
            usage_error("{}: line {} is of {}, not {} (try another file)", flag(), number, line.substr(0, first), here);
        if (found.empty() && line.substr(first + 2, last - first - 2) == product) found = line.substr(last + 2);
    }
    if (found.empty()) return {};
    AlgorithmWords words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = std::stoull(found.substr(16 * i, 16), nullptr, 16);
    return words;
}

void add_tuned_algorithm(const std::string& product, const AlgorithmWords& algorithm) {
    std::string line = fmt::format("{}; {}; ", tuned_on(), product);
    for (const uint64_t word : algorithm) line += fmt::format("{:016x}", word);
    append_tuned(line + "\n");
}

void warn_of_tuned_algorithm(const std::string& product) {
    warn(fmt::format("{}: cuBLASLt does not take its algorithm for {}; its own choice instead", flag(), product));
}

}  // namespace train70b
