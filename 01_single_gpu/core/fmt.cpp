// {fmt}, compiled once: this file is built with -fkeep-inline-functions, so that all functions of the header-only
// library are here, and the other files see declarations. The programs then need no libfmt where they run.
#define FMT_HEADER_ONLY
#include <fmt/format.h>
