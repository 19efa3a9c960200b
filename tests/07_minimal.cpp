// 07_fp8/minimal.cpp: --fp8 current on one rank, bit for bit.
#define main minimal_main
#include "07_fp8/minimal.cpp"
#undef main
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/fp8.h"
#include "tests/minimal.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("encode: the chapter's conversion, every 65,521st fp32 and all neighbours of both formats' values") {
    const auto same = [](float x) {
        const bool e4m3_alike = minimal::encode(x, minimal::kE4M3) == e4m3(x).bits;
        return std::isnan(x) || (e4m3_alike && minimal::encode(x, minimal::kE5M2) == e5m2(x).bits);
    };
    int64_t wrong = 0;
    for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 65521)
        wrong += !same(std::bit_cast<float>(uint32_t(bits)));
    for (int code = 0; code < 256; ++code)
        for (const float value : {e4m3::value(uint8_t(code)), e5m2::value(uint8_t(code))})
            for (const float factor : {1.0f, 1.0625f, 0.9375f, 1.125f, 0.875f}) {  // halfway between two values, too
                wrong += !same(value * factor);
                wrong += !same(std::nextafter(value * factor, INFINITY));
                wrong += !same(std::nextafter(value * factor, -INFINITY));
            }
    EXPECT(wrong == 0);
    for (int code = 0; code < 0x7f; ++code)
        EXPECT(minimal::decode(uint8_t(code), minimal::kE4M3) == e4m3::value(uint8_t(code)));
    for (int code = 0; code < 0x7c; ++code)
        EXPECT(minimal::decode(uint8_t(code), minimal::kE5M2) == e5m2::value(uint8_t(code)));
}

TEST_CASE("losses, norms and gradients of four steps: those of --fp8 current, bit for bit") {
    for (const Device device : {Device::cpu, Device::cuda}) {
        if (kEmulated ? device == Device::cpu : device == Device::cuda && !why_no_cuda().empty()) continue;
        minimal::Sizes s = small_sizes(device);
        s.dtype = DType::f32;
        Session complete(options_of(s, device == Device::cpu ? 4 : 2), [](Session& session) {
            apply_fp8(session.model, {.recipe = "current"}, session.options.global_batch * session.options.seq_len);
        });
        complete.run();
        minimal::Training training(s);
        const Comparison result = compare(training, complete, Whole{training.model});
        INFO(result.worst);
        EXPECT(result.worst <= 1e-15);  // the norm adds its squares in another order, in double; fp32 has 6e-8
        EXPECT(result.elements == double(options_of(s, 1).model.parameters()));
    }
}
