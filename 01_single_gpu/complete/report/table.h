#pragma once
// A table of results: built once by a function of the chapter's report, then printed as text or written as CSV.
#include <concepts>
#include <string>
#include <vector>

namespace train70b {

// What a row holds in one column. raw: the value in CSV, where it differs from the text that is shown.
struct Cell {
    Cell() = default;
    Cell(std::string text) : text(std::move(text)), raw(this->text) {}
    Cell(const char* text) : Cell(std::string(text)) {}
    template <std::integral T>
    Cell(T number) : Cell(std::to_string(number)) {}
    Cell(std::string text, double raw);
    Cell(std::string text, std::string raw) : text(std::move(text)), raw(std::move(raw)) {}

    bool operator==(const Cell&) const = default;

    std::string text, raw;
};
// In CSV each of them is the number as given.
Cell fixed(double number, int digits, const std::string& unit = "");  // 12.3456 -> "12.35"
Cell scientific(double number);                                       // 0.00123 -> "1.23e-03"
Cell milliseconds(double seconds);                                    // 0.0123 -> "12.3 ms"
Cell percent(double share, int digits = 1);                           // 0.123 -> "12.3%"

struct Column {
    Column(const char* name) : Column(std::string(name)) {}
    Column(std::string name) : name(name), csv(std::move(name)) {}
    Column(std::string name, std::string csv) : name(std::move(name)), csv(std::move(csv)) {}
    Column& text_only() { return in_csv = false, *this; }
    Column& csv_only() { return in_text = false, *this; }
    Column& left() { return align_left = true, *this; }

    std::string name, csv;  // in text; in CSV
    bool in_text = true, in_csv = true;
    bool align_left = false;  // the first column of a table is aligned to the left in any case
};

class Table {
  public:
    Table(std::string caption, std::vector<Column> columns)
        : caption_(std::move(caption)), columns_(std::move(columns)) {}

    // As many cells as columns, or fewer: the rest is empty.
    void row(std::vector<Cell> cells);
    void note(const std::string& line) { notes_.push_back(line); }  // a line below the table

    std::string text() const;  // the caption, the names of the columns, the rows, the notes
    std::string csv() const;   // names and rows; cells with commas or quotes are quoted

  private:
    std::string caption_;
    std::vector<Column> columns_;
    std::vector<std::vector<Cell>> rows_;
    std::vector<std::string> notes_;
};

}  // namespace train70b
