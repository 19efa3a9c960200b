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
