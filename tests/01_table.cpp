#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/complete/report/table.h"
#include "01_single_gpu/core/number.h"
#include "tests/support.h"

using namespace train70b;

static Table example() {
    Table table("steps of two runs",
                {"run", Column("ranks").csv_only(), {"step", "step_s"}, Column("note").text_only().left(), "bytes"});
    table.row({{"a", "first, \"a\""}, 2, milliseconds(0.0123456), "x", 1024});
    table.row({"longer", 2, milliseconds(1.5), "none", -1});
    table.row({"", 4});
    table.note("a line below");
    return table;
}

TEST_CASE("table: the text has columns of the width of their widest cell, the first one aligned to the left") {
    EXPECT(example().text() ==
           "steps of two runs\n"
           "run          step  note  bytes\n"
           "a         12.3 ms  x      1024\n"
           "longer  1500.0 ms  none     -1\n"
           "\n"
           "a line below\n");
}

TEST_CASE("table: CSV has its own names, numbers in full, and quotes around commas; no caption, no notes") {
    EXPECT(example().csv() ==
           "run,ranks,step_s,bytes\n"
           "\"first, \"\"a\"\"\",2,0.0123456,1024\n"
           "longer,2,1.5,-1\n"
           ",4,,\n");
}

TEST_CASE("numbers: decimal ones, whole, in the range of doubles") {
    for (const auto& [text, value] : {std::pair("-1.5e-3", -0.0015),
                                      {"+1", 0},
                                      {" 1", 0},
                                      {"1 ", 0},
                                      {"0x1p-3", 0},
                                      {"", 0},
                                      {".", 0},
                                      {"1e", 0},
                                      {"inf", INFINITY},
                                      {"1,5", 0},
                                      {"5e+1", 50}}) {
        INFO(text);
        EXPECT(parse_number(text).value_or(0) == value);
    }
    EXPECT(parse_number("0") == 0.0);
    EXPECT(!parse_number(std::string("1\0", 2)));
    EXPECT(std::isnan(parse_number("nan").value_or(0)));
}

TEST_CASE("table: numbers are shown rounded and kept in full") {
    EXPECT(fixed(2.0 / 3, 2, " x").text == "0.67 x");
    EXPECT(fixed(2.0 / 3, 2, " x").raw == "0.666666667");
    EXPECT(scientific(0.00123).text == "1.23e-03");
    EXPECT(percent(0.1234).text == "12.3%");
    EXPECT(percent(0.1234).raw == "0.1234");
    EXPECT(Cell(int64_t(1) << 40).raw == "1099511627776");
}

TEST_CASE("table: memory of runs, a row of formulas below those that have one, host and disk where there is some") {
    MemoryRow plain{.name = "plain", .peak = {{4, 4, 8, 16, 0, 2, 0}, 30}};
    MemoryRow derived{.name = "derived", .peak = plain.peak, .formula = kNoFormula};
    derived.formula[int(Memory::grads)] = 4;
    EXPECT(memory_table("bytes", {plain, derived}).csv() ==
           ",params,grads,optimizer,activations,comm,workspace,total\n"
           "plain,4,4,8,16,0,2,30\nderived,4,4,8,16,0,2,30\n,,4,,,,,\n");
    plain.peak.kind[int(Memory::host)] = 5;
    EXPECT(memory_table("", {plain}).csv().ends_with("workspace,host,total\nplain,4,4,8,16,0,2,5,30\n"));
    derived.peak.kind[int(Memory::host)] = derived.peak.kind[int(Memory::disk)] = 6;
    EXPECT(memory_table("", {plain, derived})
               .csv()
               .ends_with("host,disk,total\nplain,4,4,8,16,0,2,5,0,30\n"
                          "derived,4,4,8,16,0,2,6,6,30\n,,4,,,,,,,\n"));
}

TEST_CASE("memory: a peak above what was held before") {
    const MemoryPeak peak = MemoryPeak{{10, 20, 30, 40, 50, 60, 70}, 100}.above({1, 2, 3, 4, 5, 6, 7});
    EXPECT(peak.kind == MemoryBytes{9, 18, 27, 36, 45, 54, 63});
    EXPECT(peak.total == 100 - 21);  // host memory counts in no total
}
