#define DOCTEST_CONFIG_IMPLEMENT  // the header may have been seen without it
#include <doctest/doctest.h>

#include "01_single_gpu/core/environment.h"

int main(int argc, char** argv) {
    train70b::execute_with_settings(argv);
    return doctest::Context(argc, argv).run();
}
