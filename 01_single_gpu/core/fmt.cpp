// {fmt}, compiled once: this file is built with -fkeep-inline-functions, so it contains all functions of the
// header-only library, and the other files only see declarations. The programs do not need libfmt at run time.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>
