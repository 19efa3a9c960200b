#include "01_single_gpu/complete/report/table.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "01_single_gpu/core/check.h"

namespace train70b {

Cell::Cell(std::string text, double raw) : text(std::move(text)), raw(fmt::format("{:.9g}", raw)) {}

Cell fixed(double number, int digits, const std::string& unit) {
    return {fmt::format("{:.{}f}{}", number, digits, unit), number};
}
Cell scientific(double number) { return {fmt::format("{:.2e}", number), number}; }
Cell milliseconds(double seconds) { return {fmt::format("{:.1f} ms", 1e3 * seconds), seconds}; }
Cell percent(double share, int digits) { return {fmt::format("{:.{}f}%", 100 * share, digits), share}; }

void Table::row(std::vector<Cell> cells) {
    CHECK(cells.size() <= columns_.size(), "{} cells in a row of {} columns", cells.size(), columns_.size());
    cells.resize(columns_.size());
    rows_.push_back(std::move(cells));
}

std::string Table::text() const {
    std::vector<std::string> lines(rows_.size() + 1);
    bool first = true;
    for (size_t i = 0; i < columns_.size(); ++i) {
        const Column& column = columns_[i];
        if (!column.in_text) continue;
        const auto cell = [&](size_t line) { return line == 0 ? column.name : rows_[line - 1][i].text; };
        size_t width = 0;
        for (size_t line = 0; line < lines.size(); ++line) width = std::max(width, cell(line).size());
        for (size_t line = 0; line < lines.size(); ++line) {
            const std::string padding(width - cell(line).size(), ' ');
            lines[line] +=
                (first ? "" : "  ") + (first || column.align_left ? cell(line) + padding : padding + cell(line));
        }
        first = false;
    }
    std::string text = caption_.empty() ? "" : caption_ + "\n";
    for (const std::string& line : lines) text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    for (const std::string& note : notes_) text += note + "\n";
    return text;
}

std::string Table::csv() const {
    const auto quoted = [](std::string value) {
        if (value.find_first_of(",\"\n") == std::string::npos) return value;
        for (size_t at = 0; (at = value.find('"', at)) != std::string::npos; at += 2) value.insert(at, 1, '"');
        return '"' + value + '"';
    };
    std::vector<std::vector<std::string>> lines(rows_.size() + 1);
    for (size_t i = 0; i < columns_.size(); ++i) {
        if (!columns_[i].in_csv) continue;
        lines[0].push_back(quoted(columns_[i].csv));
        for (size_t r = 0; r < rows_.size(); ++r) lines[r + 1].push_back(quoted(rows_[r][i].raw));
    }
    std::string text;
    for (const auto& line : lines) text += fmt::format("{}\n", fmt::join(line, ","));
    return text;
}

}  // namespace train70b
