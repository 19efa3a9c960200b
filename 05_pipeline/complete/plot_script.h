#pragma once
// Draws timelines as a PNG: runs 05_pipeline/complete/plot_timelines.py (matplotlib) in a separate process.
#include <string>
#include <vector>

namespace train70b {

// Runs a program found in PATH, without a shell: the words are passed unchanged. Returns its exit code, 127 if there is
// no such program; `said` becomes the last line that it wrote to stderr.
int run_child(const std::vector<std::string>& words, std::string& said);

// Usage error if there is none; others: "... needs", the flags that do without it.
std::string python_with_matplotlib(const std::string& others = "--pipeline-trace FILE.json needs");

// The PNG of chrome_trace's text. Throws, with the last line of Python's stderr, if drawing fails.
std::string draw(const std::string& python, const std::string& timelines);

}  // namespace train70b
