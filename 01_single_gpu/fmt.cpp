// {fmt}, compiled once: this file is built with -fkeep-inline-functions, so that the header-only library's functions are
// all here, and the others include declarations. The programs then need no libfmt where they run.
#define FMT_HEADER_ONLY
#include <fmt/format.h>
