// What libFuzzer calls. With FUZZ_SEEDS=FOLDER in the environment: writes the target's seeds into it and its dictionary
// to FOLDER.dict, and ends.
#include <unistd.h>

#include <cctype>

#include "tests/fuzz/fuzz.h"

using namespace train70b;

namespace {
const fuzz::Target& this_target() {
    static const fuzz::Target target = fuzz::target();
    return target;
}

fuzz::Folder& folder() {
    static auto* folder = new fuzz::Folder();  // used at exit
    return *folder;
}

std::string escaped(const std::string& word) {
    std::string text;
    for (const unsigned char c : word)
        text += std::isalnum(c) ? std::string(1, char(c)) : fmt::format("\\x{:02x}", int(c));
    return text;
}
}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    end_all_ranks = [](int) { std::abort(); };  // a failed CHECK
    if (const char* seeds = std::getenv("FUZZ_SEEDS")) {
        std::filesystem::create_directories(seeds);
        int count = 0;
        for (const std::string& seed : this_target().seeds)
            std::ofstream(fmt::format("{}/seed_{:03}", seeds, count++), std::ios::binary) << seed;
        std::string words;
        for (const std::string& word : this_target().words) words += '"' + escaped(word) + "\"\n";
        std::ofstream(std::string(seeds) + ".dict") << words;
        std::_Exit(0);
    }
    std::atexit([] { folder().remove(); });
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    try {
        this_target().read(folder(), {reinterpret_cast<const char*>(bytes), size});
    } catch (const UsageError& error) {
        const std::string line = one_line(error.what());
        CHECK(!line.empty() && line.size() < 2000 && line.find('\n') == line.npos, "{}", line);
    }
    return 0;
}
