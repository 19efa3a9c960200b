// What a CPU and a GPU get: kernels of OpenBLAS, threads, settings. That the kernels run: tests/test_01_cli.py.
#include <unistd.h>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/cpu_threads.h"
#include "01_single_gpu/core/gpu_support.h"
#include "tests/support.h"

using namespace train70b;

TEST_CASE("a CPU that OpenBLAS does not know gets other kernels than the oldest") {
    using enum CpuVectors;
    for (const CpuVectors cpu : {avx2, avx512, avx512_bf16})  // OpenBLAS 0.3.21 on Intel's family 6 model 207
        EXPECT(better_blas_core(cpu, "Prescott") == "Haswell");
    EXPECT(better_blas_core(sse, "Prescott") == "");
    for (const char* core : {"Haswell", "Zen", "Cooperlake", "Graniterapids", "armv8"})
        EXPECT(better_blas_core(avx2, core) == "");
}

TEST_CASE("numbers of threads in the environment") {
    for (const int count : {1, 64, 1024}) EXPECT(thread_count(std::to_string(count)) == count);
    for (const char* text : {"0", "1025", "-1", "1.5", "2x", " 2", "abc", "", "99999999999"}) {
        INFO(text);
        EXPECT(thread_count(text) == 0);
    }
    const char* before = std::getenv("OPENBLAS_NUM_THREADS");
    const std::string kept = before ? before : "";
    for (const char* value : {"1.5", "0", "2x", "abc"}) {
        ::setenv("OPENBLAS_NUM_THREADS", value, 1);
        EXPECT_USAGE_ERROR(use_cpu_threads(1), fmt::format("OPENBLAS_NUM_THREADS={}: must be", value).c_str());
    }
    before ? ::setenv("OPENBLAS_NUM_THREADS", kept.c_str(), 1) : ::unsetenv("OPENBLAS_NUM_THREADS");
}

TEST_CASE("ranks share the cores that they may both use, and have their own") {
    const auto of = [](std::string_view cores) { return CoreSet(std::string(cores)); };
    const auto shared = [](const std::vector<CoreSet>& cores) {
        std::vector<int> ranks;
        for (size_t rank = 0; rank < cores.size(); ++rank) ranks.push_back(ranks_that_share(cores, int(rank)));
        return ranks;
    };
    using Ranks = std::vector<int>;
    EXPECT(shared({of("1111"), of("1111")}) == Ranks{2, 2});  // mpirun --bind-to none, or a container of four cores
    EXPECT(shared({of("1100"), of("0011")}) == Ranks{1, 1});  // srun --cpus-per-task=2: all of them
    EXPECT(shared({of("1100"), of("1111")}) == Ranks{2, 2});  // rounded up, so that no core is used twice
    EXPECT(shared({of("1100"), of("0111"), of("1111")}) == Ranks{3, 3, 3});
    EXPECT(shared({of("1"), of("10")}) == Ranks{1, 1});     // mpirun -np 2
    EXPECT(shared({CoreSet(), CoreSet()}) == Ranks{2, 2});  // unknown
}

TEST_CASE("these tests run the kernels that fit this CPU, unless the environment chose") {
    if (!std::getenv("OPENBLAS_CORETYPE")) EXPECT(better_blas_core(cpu_vectors(), blas_core()) == "");
}

TEST_CASE("the program sets what CUDA reads at its start, unless the environment has it") {
    if (const char* expected = std::getenv("TRAIN70B_TEST_EXPECTED")) {  // the child below
        const char* const loading = std::getenv("CUDA_MODULE_LOADING");
        EXPECT(std::string(loading ? loading : "unset") == expected);
        EXPECT(std::string(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")) == "1");
        EXPECT(std::string(std::getenv("NCCL_RUNTIME_CONNECT")) == "0");
        EXPECT(std::string(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) == "32");
        return;
    }
    for (const auto& [setting, expected] :
         {std::pair("", "unset"),
          {"OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0", "unset"},
          {"OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0", "EAGER"},
          {"PMIX_RANK=0", "EAGER"},
          {"OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 CUDA_MODULE_LOADING=LAZY", "LAZY"}}) {
        const std::string child = fmt::format(
            "env -u CUDA_MODULE_LOADING -u CUDA_DEVICE_MAX_CONNECTIONS -u NCCL_LAUNCH_ORDER_IMPLICIT "
            "-u NCCL_RUNTIME_CONNECT "
            "-u OMPI_COMM_WORLD_SIZE -u PMIX_RANK -u PMI_RANK {} TRAIN70B_TEST_EXPECTED={} /proc/{}/exe "
            "--test-case='the program sets*' > /dev/null",
            setting, expected, getpid());
        INFO(child);
        EXPECT(std::system(child.c_str()) == 0);
    }
}

TEST_CASE("which GPUs and drivers a build can run on") {
    for (const auto& [architectures, capability, runs] : {std::tuple("90a-real,80-virtual", 90, true),
                                                          {"90a-real,80-virtual", 80, true},
                                                          {"90a-real,80-virtual", 89, true},
                                                          {"90a-real,80-virtual", 100, true},
                                                          {"90a-real,80-virtual", 75, false},
                                                          {"90a", 90, true},
                                                          {"90a", 89, false},
                                                          {"90a", 100, false},
                                                          {"90a-real", 90, true},
                                                          {"80-real", 86, true},
                                                          {"86-real", 80, false},
                                                          {"80-real", 90, false},
                                                          {"80", 90, true},
                                                          {"100f-real", 103, true},
                                                          {"100f", 120, false},
                                                          {"90-virtual", 80, false},
                                                          {"80-real,90-real", 90, true},
                                                          {"native", 75, true}}) {
        INFO(architectures, " on ", capability);
        EXPECT((no_code_for(architectures, capability / 10, capability % 10) == "") == runs);
    }
    EXPECT(no_code_for("90a", 8, 9) ==
           "this build has code for 90a, not for a GPU of compute capability 8.9 (configure with "
           "-DTRAIN70B_CUDA_ARCH=89)");
    EXPECT(no_code_for("80", 7, 5).find("(the kernels need 8.0 or later") != std::string::npos);
    EXPECT(driver_too_old(13000, 13000) == "");
    EXPECT(driver_too_old(13000, 13020) == "");  // a minor version is no reason
    EXPECT(driver_too_old(14000, 13000) == "");
    EXPECT(driver_too_old(12080, 13000) ==
           "the NVIDIA driver knows CUDA up to 12.8, and this build needs CUDA 13, "
           "which needs driver 580 or later (install a newer driver)");
}

TEST_CASE("ranks with different kernels are named") {
    EXPECT(mixed_kernels({"oneDNN avx2"}) == "");
    EXPECT(mixed_kernels({"oneDNN avx2", "oneDNN avx2"}) == "");
    const std::string mixed = mixed_kernels({"oneDNN avx512_core", "oneDNN avx512_core", "oneDNN avx2"});
    EXPECT(mixed.find("oneDNN avx2 on 1 rank from 2 on, oneDNN avx512_core on 2 ranks from 0 on") != std::string::npos);
}
