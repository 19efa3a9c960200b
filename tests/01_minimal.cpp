// 01_single_gpu/minimal.cpp is the complete program on one device, less its options.
#define main minimal_main
#include "01_single_gpu/minimal.cpp"
#undef main
#include "tests/minimal.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("losses, norms and the gradients of step 1: the complete program's, to 1e-10; on a GPU to 5e-6") {
    for (const Device device : {Device::cpu, Device::cuda}) {
        if (kEmulated ? device == Device::cpu : device == Device::cuda && !why_no_cuda().empty()) continue;
        const minimal::Sizes s = small_sizes(device);
        const auto whole_program = complete(s, device == Device::cpu ? 22 : 2);  // past the warm-up's 20
        minimal::Training training(s);
        const Comparison result = compare(training, *whole_program, Whole{training.model});
        EXPECT(result.worst <= (device == Device::cpu ? 1e-10 : 5e-6));
        EXPECT(result.elements == double(options_of(s, 1).model.parameters()));
    }
}

TEST_CASE("the short forms stay short: lines, and columns") {
    const std::pair<const char*, int64_t> most[] = {{"01_single_gpu/minimal.h", 320},
                                                    {"01_single_gpu/minimal.cpp", 60},
                                                    {"02_data_parallel/minimal.cpp", 120},
                                                    {"03_zero/minimal.cpp", 160},
                                                    {"04_tensor_parallel/minimal.cpp", 110},
                                                    {"05_pipeline/minimal.cpp", 170},
                                                    {"06_context_parallel/minimal.h", 115},
                                                    {"06_context_parallel/minimal.cpp", 55},
                                                    {"07_fp8/minimal.cpp", 170},
                                                    {"08_3d_full/minimal.cpp", 280},
                                                    {"08_3d_full/experts/minimal.cpp", 220}};
    for (const auto& [name, lines] : most) {
        INFO(name);
        std::ifstream file(repository_file(name));
        int64_t count = 0;
        for (std::string line; std::getline(file, line); ++count) EXPECT(line.size() <= 120);
        EXPECT(count > 0);
        EXPECT(count <= lines);
    }
}
