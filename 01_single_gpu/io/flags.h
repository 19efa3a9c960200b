#pragma once
// Command-line flags: long, typed, checked. CLI11 does the work, in flags.cpp alone.
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace train70b {

// What a flag's value must be. The message says what would work.
struct Check {
    std::function<std::string(const std::string& value)> problem;  // empty: none
    std::string name;                                              // in --help
};
// Counts end at 10^9, so that the product of any two of them is still an int64_t.
constexpr int64_t kMostCount = 1'000'000'000;
Check whole_number_from(int64_t least, int64_t most = kMostCount);
Check real_number(double least, double most, bool least_allowed = true);
Check one_of(std::vector<std::string> names);

class Flags {
  public:
    explicit Flags(const std::string& description);
    ~Flags();
    Flags(const Flags&) = delete;

    // A flag that has been added, for what is seldom said of one.
    class Flag {
      public:
        explicit Flag(CLI::Option* option) : option_(option) {}
        Flag& text(const std::string& description);
        Flag& default_text(const std::string& text);  // shown and recorded in place of the value's initial one
        Flag& required();

      private:
        CLI::Option* option_;
    };

    void group(const std::string& name) { group_ = name; }  // --help's heading of the flags that follow
    // `value` holds the default. T: int, int64_t, uint64_t, double, std::string, std::optional<int64_t> (empty: not
    // given) or std::vector<int64_t> (a,b,...). A name without dashes is a positional argument.
    template <class T>
    Flag add(const std::string& name, T& value, const std::string& text, const Check& check = {});
    Flag add_switch(const std::string& name, bool& value, const std::string& text);  // on or off
    Flag add_flag(const std::string& name, bool& value, const std::string& text);    // present or not
    // Hands the word to a function.
    Flag add_word(const std::string& name, const std::function<void(const std::string&)>& use, const std::string& text,
                  const Check& check);
    Flag at(const std::string& name);
    bool given(const std::string& name) const;

    // Usage error with the nearest known flag for an unknown one; --help prints and throws EarlyEnd.
    void parse(int argc, char** argv);
    const nlohmann::ordered_json& values() const;  // every flag with its value, as text; after parse()
    void record(const std::string& name, const std::string& value);  // there: of one that follows from another flag

  private:
    Flag checked(CLI::Option* option, const Check& check);

    std::unique_ptr<CLI::App> app_;
    std::unique_ptr<nlohmann::ordered_json> values_;
    std::string group_ = "Options";
};

}  // namespace train70b
