// What the device says of itself: memory beside the ledger's, and why a build cannot run on it.
#include <unistd.h>

#include <cstring>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/gpu_support.h"
#include "01_single_gpu/core/profile.h"
#include "tests/cuda_ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {
// The emulated GPU: these cases once more on a device that is behind the host.
void also_on_a_late_device(const char* cases) {
    if (!kEmulated || std::getenv("EMULATE_STREAMS")) return;
    const std::string child =
        fmt::format("EMULATE_STREAMS=lazy /proc/{}/exe --test-case='{}' > /dev/null", getpid(), cases);
    EXPECT(std::system(child.c_str()) == 0);
}
}  // namespace

TEST_CASE("cuda: the device's own count of memory has the tensors, and what is beside them does not grow with them") {
    CHECK(!device_memory(Device::cpu).has_value());
    if (!have_gpu()) return;
    const int64_t bytes = 64 << 20;
    const Tensor first({1024}, DType::f32, Device::cuda);  // the context is there
    const auto before = device_memory(Device::cuda);
    REQUIRE(before.has_value());
    EXPECT(before->other > 0);
    EXPECT(before->used >= before->other + first.bytes());
    const Tensor x({bytes / 4}, DType::f32, Device::cuda);
    const auto after = device_memory(Device::cuda);
    EXPECT(after->used >= after->other + x.bytes());
    if (!kEmulated) return;  // on a GPU the pool may have had it, of tensors that are gone
    EXPECT(after->used >= before->used + bytes / 2);
    EXPECT(after->other == before->other);
}

#if TRAIN70B_CUDA
TEST_CASE("cuda: an error that any call may give, since a kernel made it, says how to find the kernel") {
    for (const int status : {700, 716, 719})  // an illegal address, a misaligned one, an unspecified failure
        EXPECT(cuda_failure(status).find("CUDA_LAUNCH_BLOCKING=1") != std::string::npos);
    EXPECT(cuda_failure(2).find("BLOCKING") == std::string::npos);  // out of memory
}
#endif

TEST_CASE("cuda: ops are timed by events: their seconds are there after one wait, and no op waits for the host") {
    if (!have_gpu()) return;
    Tensor x({1 << 16}, DType::f32, Device::cuda), host({1 << 16}, DType::f32, Device::cpu);
    fill(x, 1);
    const ProfileScope scope({.sums_on = true, .device = Device::cuda});
    for (int i = 0; i < 3; ++i) {
        const Span span("doubled", "op", 1 << 16, 8 << 16);
        scale(x, 2);
    }
    EXPECT(profile().sums["doubled"].calls == 3);
    EXPECT(profile().sums["doubled"].seconds == 0);
    profile().collect();
    const double seconds = profile().sums["doubled"].seconds;
    EXPECT(seconds > 0);
    profile().collect();  // a second time adds nothing
    EXPECT(profile().sums["doubled"].seconds == seconds);
    copy(host, x);
    EXPECT(values(host)[0] == 8);
}

TEST_CASE("cuda: uploads of any sizes, more than there are buffers, keep the values that they were given") {
    if (!have_gpu()) return;
    also_on_a_late_device("cuda: uploads of any*");
    std::vector<int32_t> list;
    std::vector<Tensor> uploaded;
    const auto size = [](int i) { return int64_t(i % 3 == 0 ? 40'000 : 1 + i); };
    const int count = 5 * kUploads;  // three rounds until no buffer has to grow, for which the device is waited
    for (int i = 0; i < count; ++i) {
        list.assign(size_t(size(i)), i);
        uploaded.push_back(upload(list, {size(i)}, Device::cuda));
        std::fill(list.begin(), list.end(), -1);
    }
    for (int i = 0; i < count; ++i) {
        Tensor host(uploaded[size_t(i)].shape(), DType::i32, Device::cpu);
        copy(host, uploaded[size_t(i)]);
        INFO("upload ", i);
        EXPECT(
            std::all_of(host.data<int32_t>(), host.data<int32_t>() + host.size(), [i](int32_t x) { return x == i; }));
    }
}

TEST_CASE("cuda: a copy from the host has read it when it returns") {
    if (!have_gpu()) return;
    also_on_a_late_device("cuda: a copy from the host*");
    const int64_t n = 1 << 16;
    Tensor x({n}, DType::f32, Device::cuda), host({n}, DType::f32, Device::cpu, Memory::host);
    fill(host, 1);
    copy(x, host);
    fill(host, 2);
    copy(host, x);
    EXPECT(values(host)[n - 1] == 1);
}

TEST_CASE("cuda: a copy on a stream of its own: after what was given to the device, before what waits for it") {
    if (!have_gpu()) return;
    also_on_a_late_device("cuda: a copy on a stream*");
    const int64_t n = 1 << 20;
    Tensor x({n}, DType::f32, Device::cuda), y({n}, DType::f32, Device::cuda), host({n}, DType::f32, Device::cpu);
    for (int i = 0; i < 4; ++i) {
        fill(x, float(i));
        CudaCopy down(host.raw(), x.raw(), x.bytes(), CopyKind::to_host);
        down.host_waits();
        EXPECT(values(host)[n - 1] == float(i));
        fill(host, -1);
        copy(y, x);
        CudaCopy up(x.raw(), host.raw(), x.bytes(), CopyKind::to_device);
        up.host_waits();
        copy(host, y);
        EXPECT(values(host)[n - 1] == float(i));
        fill(host, -1);
        CudaCopy again(y.raw(), host.raw(), y.bytes(), CopyKind::to_device);
        again.stream_waits();
        copy(host, y);
        EXPECT(values(host)[n - 1] == -1);
    }
}

TEST_CASE("cuda: more memory than there is: one line that says which") {
    if (!have_gpu()) return;
    DOCTEST_CHECK_THROWS_WITH(Tensor({int64_t(1) << 42}, DType::f32, Device::cuda),
                              doctest::Contains("out of GPU memory: 17592186044416 bytes wanted, "));
}

TEST_CASE("a GPU that this build has no code for, or an old driver: CUDA is not used, and the line says why") {
    if (!kEmulated) return;                                              // the emulated GPU can pretend both
    if (const char* expected = std::getenv("TRAIN70B_TEST_EXPECTED")) {  // the child below
        if (*expected == 0)
            EXPECT(why_no_cuda() == "");
        else
            EXPECT_USAGE_ERROR(Tensor({1}, DType::f32, Device::cuda), expected);
        return;
    }
    const std::string versions = cuda_versions();  // "..., code for 80,90a-real; ..."
    const size_t begin = versions.find("code for ") + std::strlen("code for ");
    const std::string architectures = versions.substr(begin, versions.find(';', begin) - begin);
    using Case = std::pair<const char*, std::string>;
    for (const auto& [setting, expected] :
         {Case{"EMULATE_DRIVER=12080", "--device cuda: the NVIDIA driver knows CUDA up to 12.8, and this build needs"},
          {"EMULATE_CAPABILITY=75", "not for a GPU of compute capability 7.5 (the kernels need 8.0"},
          {"EMULATE_CAPABILITY=80", no_code_for(architectures, 8, 0)},
          {"EMULATE_CAPABILITY=100", no_code_for(architectures, 10, 0)},
          {"EMULATE_DRIVER=13010", ""}}) {
        const std::string child =
            fmt::format("{} TRAIN70B_TEST_EXPECTED='{}' /proc/{}/exe --test-case='a GPU that this build*' > /dev/null",
                        setting, expected, getpid());
        INFO(child);
        EXPECT(std::system(child.c_str()) == 0);
    }
}
