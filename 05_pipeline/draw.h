#pragma once
// Timelines as a picture: 05_pipeline/draw.py and matplotlib draw, in a process of their own.
#include <string>
#include <vector>

namespace train70b {

// Runs a program, found as a shell would find it but without one: the words reach it as they are. Its exit code, 127
// where there is no such program; `said` becomes the last line that it wrote to stderr.
int run_python(const std::vector<std::string>& words, std::string& said);

std::string python_with_matplotlib();  // usage error of --draw where there is none

// The PNG of timelines_json's text. An exception with Python's last line where drawing fails.
std::string draw(const std::string& python, const std::string& timelines);

}  // namespace train70b
