#pragma once
// The file of --config: lines NAME = VALUE in TOML, without sections. Only flags.cpp includes this.
#include <CLI/CLI.hpp>

namespace train70b {

// CLI11's own reader cuts a text at a # and drops what it cannot read.
class ConfigFile : public CLI::Config {
  public:
    // Every option that was given.
    std::string to_config(const CLI::App* app, bool, bool, std::string) const override;
    // Usage error "--config: line N: ..." for a line that is none.
    std::vector<CLI::ConfigItem> from_config(std::istream& file) const override;
};

}  // namespace train70b
