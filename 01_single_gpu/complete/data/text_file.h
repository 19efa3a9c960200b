#pragma once
// What --data takes for a text: any file whose first bytes are not those of another format.
#include <string>
#include <string_view>

#include "01_single_gpu/core/files.h"

namespace train70b {

// Of a file's first bytes: "a Parquet file (WHAT WOULD WORK)"; empty: no format that is known.
std::string known_format(std::string_view first_bytes);
// The share of bytes that belong to no UTF-8 character, 0 to 1. The text may end within a character.
double share_not_utf8(std::string_view text);
// Usage error if the file has another format; a line on rank 0 if what it begins with is not UTF-8.
void check_text(const InputFile& file, const std::string& path);

}  // namespace train70b
