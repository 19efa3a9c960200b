#pragma once
// Typed and checked command-line flags. Wraps CLI11, which only flags.cpp includes.
#include <cstdint>
#include <functional>
#include <limits>
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

// The check of a flag's value.
struct Check {
    std::function<std::string(const std::string& value)> problem;  // an error message that says what is allowed, or ""
    std::string name;                                              // of the value in --help: INT, FILE.csv, on|off
};
// Counts are limited to 10^9, so the product of any two of them fits into an int64_t.
constexpr int64_t kMaxCount = 1'000'000'000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargest = 1e6;  // of rates and coefficients: far beyond it training does nothing, or only overflows
Check integer_from(int64_t min, int64_t max = kMaxCount);
Check real_number(double min, double max, bool min_allowed = true);
Check one_of(std::vector<std::string> names);

class Flags {
  public:
    explicit Flags(const std::string& description);
    ~Flags();
    Flags(const Flags&) = delete;

    // A handle to change a flag that was added.
    class Flag {
      public:
        explicit Flag(CLI::Option* option) : option_(option) {}
        Flag& text(const std::string& description);
        Flag& default_text(const std::string& text);  // recorded and shown instead of the initial value

      private:
        CLI::Option* option_;
    };

    void group(const std::string& name) { group_ = name; }  // heading in --help of the flags that follow
    // `value` holds the default. T: int, int64_t, uint64_t, double, std::string, std::optional<int64_t> (empty: not
    // given), or a vector of int64_t or std::string (a,b,...). A name without dashes is a positional argument. --help
    // appends "[default: X]" to the text unless the text contains such a note.
    template <class T>
    Flag add(const std::string& name, T& value, const std::string& text, const Check& check = {});
    Flag add_switch(const std::string& name, bool& value, const std::string& text);  // on or off
    Flag add_flag(const std::string& name, bool& value, const std::string& text);    // true if present
    // Calls `use` with the value.
    Flag add_word(const std::string& name, const std::function<void(const std::string&)>& use, const std::string& text,
                  const Check& check);
    Flag at(const std::string& name);
    bool given(const std::string& name) const;

    // Usage error, suggesting the nearest flag, for an unknown flag, on the command line or in the file of --config;
    // --help, --version and --print-config print and throw EarlyEnd.
    void parse(int argc, char** argv);
    // After parse(): every flag with its value as text; "config": those that were given, as --config reads them.
    const nlohmann::ordered_json& values() const;
    void record(const std::string& name, const std::string& value);  // overrides an entry of values()

  private:
    Flag checked(CLI::Option* option, const Check& check);

    std::unique_ptr<CLI::App> app_;
    std::unique_ptr<nlohmann::ordered_json> values_;
    std::string group_ = "Options";
};

}  // namespace train70b
