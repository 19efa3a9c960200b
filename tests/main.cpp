#define DOCTEST_CONFIG_IMPLEMENT
#include "01_single_gpu/cpu_setup.h"
#include "tests/support.h"

int main(int argc, char** argv) {
    train70b::restart_with_cpu_settings(argv);
    return doctest::Context(argc, argv).run();
}
