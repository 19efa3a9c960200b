// What chapter 01 refuses: flags, data, and outputs over inputs or where no file can be.
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/refusals.h"

using namespace train70b;
using namespace train70b::test;

namespace {

const std::string kModel =
    "--layers 1 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16 --global-batch 2 --steps 3";
const std::string kShape = kModel + " --metrics m.jsonl --trace t.json --memory-timeline t.csv";

// Each: name, parts of the message, flags, which replace the defaults.
using Cases = std::vector<std::array<std::string, 3>>;
void expect_refused(const Workplace& place, const std::string& defaults, const Cases& cases) {
    for (const auto& [name, parts, flags] : cases)
        place.refused(name, "01_single_gpu", parts, completed(flags, defaults));
}

// llm.c's: a header of 256 int32 (magic, version, tokens), then tokens of 2 bytes.
std::string shard(int32_t magic, int32_t version, int32_t tokens) {
    const int32_t header[256] = {magic, version, tokens};
    return std::string(reinterpret_cast<const char*>(header), sizeof header) + std::string(2 * size_t(tokens), '\0');
}

// While it exists, this process may map so many bytes more.
struct AddressSpace {
    struct rlimit before {};
    explicit AddressSpace(int64_t bytes) {
        int64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        REQUIRE(::getrlimit(RLIMIT_AS, &before) == 0);
        struct rlimit low = before;
        low.rlim_cur = rlim_t(pages) * rlim_t(::sysconf(_SC_PAGE_SIZE)) + rlim_t(bytes);
        REQUIRE(::setrlimit(RLIMIT_AS, &low) == 0);
    }
    ~AddressSpace() { ::setrlimit(RLIMIT_AS, &before); }
};

}  // namespace

TEST_CASE("01: flags") {
    const Workplace place;
    std::string text;
    for (int i = 0; i < 100; ++i) text += fmt::format("line {} of a text\n", i);
    write_text(place.file("text.txt"), text);
    expect_refused(
        place, "--data ../files/text.txt " + kShape,
        {
            {"unknown flag with a value", "--leyers=2|did you mean --layers?", "--leyers=2"},
            {"value missing", "--lr|missing", "--lr"},
            {"next flag taken for a value", "--lr", "--lr --clip 1"},
            {"stray word", "stray|--flag value", "stray"},
            {"negative steps", "--steps|-1|integer >= 0", "--steps -1"},
            {"no layers", "--layers|integer from 1 to 10000", "--layers 0"},
            {"experts of a token without experts", "--top-k|needs --experts N", "--top-k 2"},
            {"one expert of a token, with the weight 1", "--top-k 1|try --router-normalize off",
             "--experts 4 --top-k 1"},
            {"balancing without experts", "--aux-loss|needs --experts N", "--aux-loss 0.1"},
            {"a way to balance, without balancing", "--aux-loss-over batch|try --aux-loss 0.01",
             "--experts 4 --aux-loss 0 --aux-loss-over batch"},
            {"more experts of a token than there are", "--top-k 9|at most --experts 8", "--experts 8 --top-k 9"},
            {"only dense layers", "--dense-layers 1|less than --layers 1", "--experts 4 --dense-layers 1"},
            {"groups of experts", "--experts 8|--expert-groups 3|try 1", "--experts 8 --expert-groups 3"},
            {"groups of a token", "--top-groups 3|--expert-groups 2", "--experts 8 --expert-groups 2 --top-groups 3"},
            {"too few experts in the best groups", "--top-k 3|2 experts|try --top-groups 2",
             "--experts 8 --top-k 3 --expert-groups 4"},
            {"capacity below 0", "--capacity-factor|-1", "--experts 8 --capacity-factor -1"},
            {"experts in a format without them",
             "--save-hf|--router sigmoid, --qk-norm off and --shared-experts 0|try --qk-norm on --shared-experts 1",
             "--experts 8 --router sigmoid --save-hf hf"},
            {"biases in a format without them", "--save-reference|--router-bias-rate|try --router-bias-rate 0",
             "--experts 8 --router-bias-rate 0.1 --save-reference r"},
            {"half a step", "--steps|1.5|integer", "--steps 1.5"},
            {"more than 64 bits", "--steps|integer from 0 to 1000000000", "--steps 99999999999999999999"},
            {"a leading zero (octal to some)", "--steps|integer", "--steps 010"},
            {"lr nan", "--lr|nan|must be a number >= 0", "--lr nan"},
            {"lr inf", "--lr|inf|must be a number >= 0", "--lr inf"},
            {"lr no number", "--lr|x|must be a number >= 0", "--lr x"},
            {"lr in hexadecimal", "--lr: 0x1p-3 must be a number >= 0", "--lr 0x1p-3"},
            {"lr behind a tab", "--lr: \\x091e-3 must be a number >= 0", "--lr \t1e-3"},
            {"lr with a tail", "--lr|1e-3x|must be a number >= 0", "--lr 1e-3x"},
            {"min-lr above lr", "--min-lr 0.5 must be at most --lr 0.1", "--lr 0.1 --min-lr 0.5"},
            {"beta of one", "--beta2|<= 0.99", "--beta2 1"},
            {"heads do not divide hidden", "--hidden 32 is not divisible by --heads 7 (try --hidden 35)", "--heads 7"},
            {"kv-heads do not divide heads", "--heads 8 is not divisible by --kv-heads 3 (try --kv-heads 1)",
             "--heads 8 --kv-heads 3"},
            {"odd head size", "--hidden 130 / --heads 2 = 65|even", "--hidden 130 --heads 2"},
            {"head size too large", "--hidden 2048 / --heads 4 = 512|at most 256", "--hidden 2048"},
            {"dtype", "--dtype|fp16|fp32|bf16|fp64", "--dtype fp16"},
            {"fp64 on a GPU", "--dtype fp64|--device cpu", "--dtype fp64 --device cuda"},
            {"fp64 with gradients that are not", "--grad-dtype fp32|must be fp64", "--dtype fp64 --grad-dtype fp32"},
            {"fp64 gradients of fp32", "--grad-dtype fp64|--dtype fp64", "--grad-dtype fp64"},
            {"fp64 gradients of bf16", "--grad-dtype fp64|--dtype fp64", "--grad-dtype fp64 --dtype bf16"},
            {"model", "--model|9b|tiny|8b|405b", "--model 9b"},
            {"bf16 gradients of fp32", "--grad-dtype bf16|--dtype", "--grad-dtype bf16"},
            {"recompute", "--recompute|some|none|pointwise|selective|full", "--recompute some"},
            {"schedule", "--lr-schedule|step|constant|wsd", "--lr-schedule step"},
            {"accumulation does not divide",
             "--global-batch 10 is not divisible by --micro-batch 4|try --global-batch 12",
             "--global-batch 10 --micro-batch 4"},
            {"val-fraction", "--val-fraction|1.5|<= 0.9", "--val-fraction 1.5"},
            {"validation without a part", "--eval-every 2|--val-fraction", "--eval-every 2 --val-fraction 0"},
            {"token outside the vocabulary", "text.txt|--vocab 109 or more", "--vocab 64"},
            // sizes beyond the machine, or beyond 64 bits
            {"a vocabulary of 2^57", "--vocab|to 1000000000", "--vocab 144115188075855872"},
            {"a model of more than 1e15 parameters", "--hidden 1000000000: the model would have",
             "--hidden 1000000000 --heads 10000000"},
            {"a sequence of 2^63-1", "--seq-len|to 1000000000", "--seq-len 9223372036854775807"},
            {"more layers than memory", "--layers 10000|this machine has|--dry-run",
             "--layers 10000 --hidden 4096 --heads 32"},
            {"a batch beyond memory", "--global-batch 1000000000 with --seq-len 16|this machine has",
             "--global-batch 1000000000 --hidden 128"},
            {"a micro-batch beyond memory", "--micro-batch 500000000 with --seq-len 16|this machine has",
             "--global-batch 1000000000 --micro-batch 500000000 --hidden 128"},
        });
    const AddressSpace limit(1 << 30);
    expect_refused(place, "--data ../files/text.txt " + kShape,
                   {{"logits beyond the limit", "--global-batch 2 with --seq-len 1000000: activations|ulimit -v leaves",
                     "--seq-len 1000000"},
                    {"a model beyond the limit", "--layers 8 --hidden 1024|weights, gradients|ulimit -v leaves",
                     "--layers 8 --hidden 1024 --ffn 4096"}});
}

TEST_CASE("01: data") {
    const Workplace place;
    const std::string good = shard(20240520, 1, 200);
    for (const auto& [name, content] : std::map<std::string, std::string>{{"empty.txt", ""},
                                                                          {"short.txt", "only a few"},
                                                                          {"truncated.bin", good.substr(0, 1400)},
                                                                          {"header.bin", good.substr(0, 1000)},
                                                                          {"magic.bin", shard(1234567, 1, 200)}})
        write_text(place.file(name), content);
    std::filesystem::create_directory(place.file("folder"));
    REQUIRE(::mkfifo(place.file("fifo").c_str(), 0600) == 0);
    std::filesystem::create_directory(place.file("deep"));
    write_text(place.file("deep/config.json"), std::string(200'000, '['));
    expect_refused(place, kShape,
                   {{"missing data", "--data nowhere.txt|text file", "--data nowhere.txt"},
                    {"empty data", "empty.txt|--seq-len + 1 = 17", "--data ../files/empty.txt"},
                    {"empty folder", "../files/folder|has no files|.bin", "--data ../files/folder"},
                    {"too short data", "short.txt|10 tokens|try --seq-len 9", "--data ../files/short.txt"},
                    {"truncated shard", "truncated.bin|1424 bytes in total, but the file has 1400",
                     "--data ../files/truncated.bin"},
                    {"shard without its header", "header.bin|a header of 1024", "--data ../files/header.bin"},
                    {"wrong magic", "magic.bin|magic number 1234567|20240520", "--data ../files/magic.bin"},
                    {"data from a FIFO", "--data|fifo: is not a regular file", "--data ../files/fifo"},
                    {"no name of a model", "--load-hf: empty path", "--load-hf ''"}});
    // What a folder names is not left out because it cannot be read.
    for (const char* name : {"lost_mask", "mask_folder", "mask_fifo", "lost_shard", "loop", "link"})
        std::filesystem::create_directory(place.file(name));
    for (const char* name : {"lost_mask/a.bin", "mask_folder/a.bin", "mask_fifo/a.bin", "lost_shard/a.bin"})
        write_text(place.file(name), good);
    for (const char* name : {"lost_mask/a.mask.bin", "lost_shard/b.bin"})
        std::filesystem::create_symlink("nowhere", place.file(name));
    std::filesystem::create_directory(place.file("mask_folder/a.mask.bin"));
    REQUIRE(::mkfifo(place.file("mask_fifo/a.mask.bin").c_str(), 0600) == 0);
    for (const char* name : {"loop/a.txt", "link/a.txt"}) write_text(place.file(name), std::string(500, 'x'));
    std::filesystem::create_symlink("b", place.file("loop/b"));
    std::filesystem::create_directory_symlink("../deep", place.file("link/b"));
    const std::string no_mask = "a.mask.bin: is not a regular file (must be the mask of its shard";
    expect_refused(place, kShape,
                   {{"a mask that leads nowhere", "lost_mask/a.mask.bin: cannot be read", "--data ../files/lost_mask"},
                    {"a shard whose mask does", "lost_mask/a.mask.bin: cannot", "--data ../files/lost_mask/a.bin"},
                    {"a mask that is a folder", "mask_folder/" + no_mask, "--data ../files/mask_folder"},
                    {"a mask that is a FIFO", "mask_fifo/" + no_mask, "--data ../files/mask_fifo"},
                    {"a shard that leads nowhere", "lost_shard/b.bin: cannot be read", "--data ../files/lost_shard"},
                    {"a text that leads to itself", "loop/b: cannot be read", "--data ../files/loop"},
                    {"a folder behind a link", "link/b: is a link to a folder", "--data ../files/link"}});
    place.refused("a config.json that is nested deeply", "01_single_gpu", "deep/config.json|nested deeper than 64",
                  "--load-hf ../files/deep");
    place.refused("experts of a loaded model", "01_single_gpu", "--top-k|not allowed with --load-hf",
                  "--load-hf ../files/deep --top-k 2");
}

TEST_CASE("01: outputs") {
    const Workplace place;
    const std::string text(2000, 'x');
    for (const char* name : {"texts", "folder"}) std::filesystem::create_directory(place.file(name));
    for (const char* name : {"mine.txt", "t.json.tmp", "texts/a.txt"}) write_text(place.file(name), text);
    std::filesystem::create_hard_link(place.file("mine.txt"), place.file("hard.txt"));
    std::filesystem::create_symlink("mine.txt", place.file("soft.txt"));
    REQUIRE(::mkfifo(place.file("fifo").c_str(), 0600) == 0);
    // over inputs and over one another
    expect_refused(place, kModel,
                   {{"--metrics over --data", "--metrics|mine.txt|--data|another",
                     "--data ../files/mine.txt --metrics ../files/mine.txt"},
                    {"--metrics over --data by another name", "--metrics|hard.txt|--data|another",
                     "--data ../files/mine.txt --metrics ../files/hard.txt"},
                    {"--metrics over --data by a link", "--metrics|soft.txt|--data|another",
                     "--data ../files/mine.txt --metrics ../files/soft.txt"},
                    {"--trace over a file of --data", "--trace|texts/a.txt|--data",
                     "--data ../files/texts --trace ../files/texts/a.txt"},
                    {"--trace whose temporary file is --data", "--trace|t.json.tmp|--data",
                     "--data ../files/t.json.tmp --trace ../files/t.json"},
                    {"one file for two outputs", "--trace|--metrics|use two files", "--metrics x --trace ./x"},
                    {"an output that is another's temporary file", "--metrics|--trace|temporary file",
                     "--trace x --metrics x.tmp"}});
    place.call("01_single_gpu", completed("--steps 0 --save-hf ../files/hf", kModel));
    for (const std::string flag : {"--metrics ../files/hf/model.safetensors", "--trace ../files/hf/config.json",
                                   "--save-hf ../files/hf", "--save-reference ../files/hf"})
        place.refused("over --load-hf", "01_single_gpu", split_at(flag, ' ')[0] + "|--load-hf",
                      flag + " --load-hf ../files/hf --seq-len 16 --steps 1");
    // where no file can be
    expect_refused(
        place, kShape,
        {{"a folder for a file", "--trace|folder: is a folder", "--trace ../files/folder"},
         {"a FIFO for a file", "--trace|fifo: is a FIFO", "--trace ../files/fifo"},
         {"no name", "--metrics: empty path", "--metrics ''"},
         {"--metrics in no folder", "--metrics nowhere/file|existing, writable folder", "--metrics nowhere/file"},
         {"--trace in no folder", "--trace nowhere/file|existing, writable folder", "--trace nowhere/file"},
         {"--memory-timeline in no folder", "--memory-timeline nowhere/file|existing, writable folder",
          "--memory-timeline nowhere/file"}});
}
