#include "tests/programs.h"

// Each main.cpp under names of its own.
#define main main_schedule
#include "05_pipeline/complete/schedule_tool_main.cpp"
#undef main

#define main main_plan
#include "08_3d_full/plan/main.cpp"
#undef main

#define main main_01
#define program program_01
#include "01_single_gpu/complete/main.cpp"
#undef main
#undef program

#define main main_02
#define program program_02
#include "02_data_parallel/complete/main.cpp"
#undef main
#undef program

#define main main_03
#define program program_03
#include "03_zero/complete/main.cpp"
#undef main
#undef program

#define main main_04
#define program program_04
#include "04_tensor_parallel/complete/main.cpp"
#undef main
#undef program

#define main main_05
#define program program_05
#include "05_pipeline/complete/main.cpp"
#undef main
#undef program

#define main main_06
#define program program_06
#include "06_context_parallel/complete/main.cpp"
#undef main
#undef program

#define main main_07
#define program program_07
#include "07_fp8/complete/main.cpp"
#undef main
#undef program

#define main main_08
#define program program_08
#include "08_3d_full/complete/main.cpp"
#undef main
#undef program

namespace train70b::test {

void call_program(const std::string& name, int argc, char** argv) {
    struct Known {
        const char* name;
        void (*program)(int, char**);
    };
    constexpr auto schedule = [](int count, char** words) { Sandbox().run(count, words); };
    constexpr auto plan = [](int count, char** words) { Planner().run(count, words); };
    constexpr Known kPrograms[] = {{"01_single_gpu", program_01}, {"02_data_parallel", program_02},
                                   {"03_zero", program_03},       {"04_tensor_parallel", program_04},
                                   {"05_pipeline", program_05},   {"06_context_parallel", program_06},
                                   {"07_fp8", program_07},        {"08_3d_full", program_08},
                                   {"schedule", schedule},        {"plan", plan}};
    for (const Known& known : kPrograms)
        if (name == known.name) return known.program(argc, argv);
    CHECK(false, "{} is not a program of the tests", name);
}

}  // namespace train70b::test
