#define DOCTEST_CONFIG_IMPLEMENT  // the header may have been seen without it
#include <doctest/doctest.h>

#include "01_single_gpu/core/cpu_setup.h"

int main(int argc, char** argv) {
    train70b::restart_with_settings(argv);
    return doctest::Context(argc, argv).run();
}
