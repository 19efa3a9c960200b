// What the programs of chapters 02 to 08 refuse: flags and layouts that do not fit, files that cannot be used. All
// ranks but one are simulated. What depends on real ranks, exit codes and standard streams is in the scripts,
// tests/NN_cli.sh.
// Run: build/bin/test_refusals
#include "tests/refusals.h"

#include <sys/stat.h>

using namespace train70b;
using namespace train70b::test;

namespace {

struct Case {
    std::string name;
    int64_t ranks;  // one: this process; more: simulated
    std::string parts, flags;
};

void expect_refused(const Workplace& place, const std::string& program, const std::string& defaults,
                    const std::vector<Case>& cases) {
    for (const auto& [name, ranks, parts, flags] : cases) {
        const std::string world = ranks > 1 ? fmt::format("--comm fake --fake-world {} ", ranks) : "";
        place.refused(name, program, parts, world + completed(flags, defaults));
    }
}

const std::string kShort = "--steps 1 --metrics m.jsonl", kChapter = kShort + " --tables off";

}  // namespace

TEST_CASE("02") {
    expect_refused(
        Workplace(), "02_data_parallel", kChapter,
        {{"--dp unlike the ranks", 2, "--dp 3: there are 2 ranks|mpirun -np 3", "--dp 3"},
         {"--dp unlike the ranks, alone", 1, "--dp 2: there are 1 ranks", "--dp 2"},
         {"a batch that does not divide into micro-batches", 2,
          "--global-batch 12|--micro-batch 4|try --global-batch 16", "--global-batch 12 --micro-batch 4"},
         {"staged on the CPU", 1, "--comm staged|use --comm mpi", "--device cpu --comm staged"},
         {"nccl on the CPU", 1, "--comm nccl|use --comm mpi", "--device cpu --comm nccl"},
         {"unknown backend", 1, "--comm|smoke|auto|nccl|staged|fake", "--comm smoke"},
         {"unknown all-reduce", 2, "--all-reduce|star|ring|halving", "--all-reduce star"},
         {"no time at all", 2, "--comm-timeout|0|must be a number > 0", "--comm-timeout 0"},
         {"negative buckets", 2, "--bucket-mb|-1", "--bucket-mb -1"},
         {"overlap neither on nor off", 2, "--overlap|maybe|on|off", "--overlap maybe"},
         {"--comm fake without a number of ranks", 1, "--comm fake|requires --fake-world N", "--comm fake"},
         {"a fake rank outside the group", 4, "--fake-rank 4|0 to 3", "--fake-rank 4"},
         {"--fake-world without --comm fake", 1, "--fake-world 4 requires --comm fake", "--fake-world 4"},
         {"--fake-rank without --comm fake", 1, "--fake-rank 1 requires --comm fake", "--fake-rank 1"},
         {"a file for a table that is not made", 2, "--all-reduce-csv|--tables off", "--all-reduce-csv a.csv"},
         {"a flag of no chapter", 2, "--bucket-md: unknown flag; did you mean --bucket-mb?", "--bucket-md 3"}});
}

TEST_CASE("03") {
    const std::string divides = "ranks that share parameters (--dp, and --cp) are not divisible by --hybrid-shard";
    expect_refused(Workplace(), "03_zero", kChapter,
                   {{"a stage that is none", 2, "--zero|4|0|1|2|3", "--zero 4"},
                    {"a group that does not divide", 4, "the 4 " + divides + " 3", "--hybrid-shard 3"},
                    {"a group of more ranks than there are", 2, "the 2 " + divides + " 4 (try --hybrid-shard 2)",
                     "--hybrid-shard 4"},
                    {"a group of nothing", 2, "--hybrid-shard|integer >= 1", "--hybrid-shard 0"},
                    {"shards of stage 0", 2, "--hybrid-shard 2|--zero 1, 2 or 3", "--zero 0 --hybrid-shard 2"},
                    {"offload of stage 0", 2, "--offload|--zero 1, 2 or 3", "--zero 0 --offload optimizer"},
                    {"shards to the host without shards", 2, "--offload all|--zero 3|--offload optimizer",
                     "--zero 2 --offload all"},
                    {"offload to somewhere", 2, "--offload|disk|none|optimizer|all", "--offload disk"},
                    {"negative prefetch", 2, "--prefetch|-1", "--prefetch -1"},
                    {"--dp unlike the ranks", 2, "--dp 3: there are 2 ranks", "--dp 3"}});
}

TEST_CASE("04: flags") {
    expect_refused(
        Workplace(), "04_tensor_parallel", kChapter,
        {{"ffn that does not divide", 4, "--ffn 90 is not divisible by --tp 4 (try --tp 1 or 2)", "--tp 4 --ffn 90"},
         {"key/value heads that neither divide nor can be copied", 4,
          "--kv-heads 6 is not divisible by --tp 4|(try --tp 1, 2, 3, 6 or 12)",
          "--heads 12 --kv-heads 6 --hidden 96 --ffn 96 --tp 4"},
         {"a sequence that does not divide", 2,
          "--sequence-parallel on: --seq-len 127 is not divisible by --tp 2 (try --seq-len 128)",
          "--tp 2 --sequence-parallel on --seq-len 127"},
         {"more tensor-parallel ranks than there are", 2,
          "--tp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --tp 2)", "--tp 4"},
         {"ranks that tp does not divide", 3, "--tp 2: 3 ranks are not divisible by 2 (try mpirun -np 4, or --tp 1)",
          "--tp 2"},
         {"--tp and --dp unlike the ranks", 4,
          "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)", "--tp 2 --dp 4"},
         {"--dp alone that does not divide the ranks", 4, "4 ranks are not divisible by --dp 3", "--dp 3"},
         {"--tp of nothing", 2, "--tp|integer >= 1", "--tp 0"},
         {"neither on nor off", 2, "--sequence-parallel|on", "--sequence-parallel maybe"},
         {"overlap neither on nor off", 2, "--tp-overlap|on", "--tp-overlap yes"},
         {"a checkpoint of simulated ranks", 4, "--save-hf x: with --comm fake", "--tp 2 --save-hf x"},
         {"links without tables", 2, "--links, --efficiency-csv", "--links nowhere.json"}});
}

TEST_CASE("04: a cluster that is none") {
    const Workplace place;
    const auto refused = [&](const std::string& name, const std::string& why) {
        place.refused(name, "04_tensor_parallel", "--links ../files/links.json: " + why,
                      "--comm fake --fake-world 2 --steps 1 --metrics m.jsonl --links ../files/links.json");
    };
    const std::string path = place.file("links.json"),
                      node = R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 8)";
    refused("a file that is not there", "cannot be read");
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    refused("links from a FIFO", "is not a regular file");
    std::filesystem::remove(path);
    for (const auto& [name, text, why] : std::vector<std::array<std::string, 3>>{
             {"links that are no JSON", "nonsense", "truncated or corrupt"},
             {"no device", R"({"name": "x"})", "device: is missing"},
             {"a device that is a list", R"({"name": "x", "device": []})", "device: must be an object"},
             {"a device that nobody knows", R"({"name": "x", "device": "H1000"})",
              "device: H1000 is not known (A100, H100, H200, B200;"},
             {"a link without bandwidth", node + R"(, "nvlink": {"seconds": 1}})", "nvlink.bytes_per_s: is missing"},
             {"no bandwidth", node + R"(, "rail": {"bytes_per_s": 0, "seconds": 1}})",
              "rail.bytes_per_s: must be above 0"},
             {"negative latency", node + R"(, "host": {"bytes_per_s": 1e9, "seconds": -1}})",
              "host.seconds: must be at least 0"},
             {"no links", node + "}", "nvlink: is missing, and host: 8 devices in a node"},
             {"one device without links", R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 1})",
              "has no link"},
             {"an unknown key", node + R"(, "links": []})", "links: is no key of the format"},
             {"links that are nested deeply", std::string(200'000, '['), "nested deeper than 64 levels"}}) {
        write_text(path, text);
        refused(name, why);
    }
}

// Files of schedules, in `files`.
static void write_schedules(const Workplace& place) {
    for (const auto& [name, text] : {std::pair("good", "F0 F1 B0 B1\nF0 B0 F1 B1\n"),
                                     {"typo", "F0 F1 B0 B1\nF0 b0 F1 B1\n"},
                                     {"half", "F0 F1 B0 B1\nF0 B0 F1\n"},
                                     {"missing", "F0 F1 B0 B1\nF0 B0\n"},
                                     {"cycle", "F0 B0 F1 B1\nF0 F1 B0 B1\n"}})
        write_text(place.file(name), text);
}

TEST_CASE("05") {
    const Workplace place;
    write_schedules(place);
    expect_refused(
        place, "05_pipeline", kChapter,
        {{"more stages than layers", 4, "--pp 4: more stages than --layers 2", "--pp 4 --layers 2"},
         {"layers that do not divide", 3,
          "--layers 4 is not divisible by --pp 3 (try --layers 3 or 6, or --stage-layers 2,1,1)",
          "--pp 3 --global-batch 15"},
         {"stages that do not sum", 2, "--stage-layers 2,1: 3 layers; the model has 4", "--stage-layers 2,1"},
         {"too many stages listed", 2, "--stage-layers 2,1,1: lists 3 stages; --pp 2 makes 2", "--stage-layers 2,1,1"},
         {"a stage of nothing", 2, "--stage-layers 4,0: each stage needs at least one layer", "--stage-layers 4,0"},
         {"a stage that is no number", 2, "--stage-layers", "--stage-layers 2,x"},
         {"interleaved without whole groups", 4,
          "--pipeline interleaved: 6 micro-batches are not divisible by --pp 4 (try 4 or 8)",
          "--pp 4 --layers 8 --pipeline interleaved --global-batch 6"},
         {"chunks of another schedule", 2,
          "--virtual-stages 2: --pipeline 1f1b has one model chunk per rank (try --pipeline interleaved)",
          "--virtual-stages 2"},
         {"a schedule that is none", 2, "--pipeline|1f1b|zero-bubble|file:SCHEDULE", "--pipeline 2f2b"},
         {"chunks of a V", 2,
          "--virtual-stages 3: --pipeline zb-v has two model chunks per rank (try --pipeline interleaved)",
          "--pipeline zb-v --virtual-stages 3"},
         {"more stages of a V than layers", 4, "--pp 4 x 2 chunks of --pipeline zb-v = 8: more stages than --layers 4",
          "--pipeline zb-v"},
         {"a V on one stage", 2, "--pipeline dualpipe-v: needs at least two pipeline ranks (try --pp 2)",
          "--pipeline dualpipe-v --pp 1"},
         {"too few micro-batches for dualpipe-v", 2,
          "--pipeline dualpipe-v: 3 micro-batches are fewer than 4 on --pp 2 (try 4, or zb-v)",
          "--pipeline dualpipe-v --global-batch 3"},
         {"a schedule's file that is not there", 2, "--pipeline file:../files/none: cannot be read",
          "--pipeline file:../files/none"},
         {"a schedule's file that is a folder", 2, "--pipeline file:../files: is not a regular file",
          "--pipeline file:../files"},
         {"no file", 2, "--pipeline", "--pipeline file:"},
         {"a typo in a schedule", 2, "typo, line 2, word 2 \"b0\": is no step",
          "--pipeline file:../files/typo --global-batch 2"},
         {"half a schedule", 2, "half: rank 1: micro-batch 1 goes through chunk 0 as \"F\"",
          "--pipeline file:../files/half --global-batch 2"},
         {"a micro-batch that a rank lacks", 2, "missing: rank 1: micro-batch 1 is missing in chunk 0",
          "--pipeline file:../files/missing --global-batch 2"},
         {"a schedule that deadlocks", 2,
          "cycle: rank 0 at B0 waits for the gradient of micro-batch 0 from rank 1; rank 1 at F1",
          "--pipeline file:../files/cycle --global-batch 2"},
         {"a schedule of other micro-batches", 2, "good: is for 2 micro-batches, and there are 4",
          "--pipeline file:../files/good --global-batch 4"},
         {"a schedule of other ranks", 4, "good: has steps for 2 ranks, and --pp is 4 (try --pp 2)",
          "--pipeline file:../files/good --global-batch 2"},
         {"chunks beside a file", 2, "--virtual-stages 2: the chunks of --pipeline file:../files/good are in the file",
          "--pipeline file:../files/good --virtual-stages 2"},
         {"no micro-batch", 2,
          "--global-batch 2 is not divisible by --micro-batch 4 x 1 data-parallel ranks (try --global-batch 4)",
          "--global-batch 2 --micro-batch 4"},
         {"zero micro-batches", 2, "--global-batch|integer >= 1", "--global-batch 0"},
         {"more stages than ranks", 2, "--pp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --pp 2)",
          "--pp 4"},
         {"--pp and --dp unlike the ranks", 4,
          "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)", "--pp 2 --dp 4"},
         {"a drawing without tables", 2, "--draw, --pipeline-trace: belong to the tables", "--draw x.png"},
         {"a drawing of one rank", 1, "one stage is no pipeline to show", "--tables on --draw x.png"}});
}

TEST_CASE("schedule") {
    const Workplace place;
    write_schedules(place);
    std::string many;
    for (int i = 0; i < 5000; ++i) many += "F0 B0\n";
    write_text(place.file("many"), many);
    expect_refused(
        place, "schedule", "",
        {{"a typo", 1, "typo, line 2, word 2 \"b0\": is no step", "--file ../files/typo"},
         {"a file that is not there", 1, "--file nothing: cannot be read", "--file nothing"},
         {"a file and a name", 1, "--file good and --name 1f1b: are two schedules", "--file good --name 1f1b"},
         {"other stages", 1, "--stages 3: --file ../files/good has 2", "--file ../files/good --stages 3"},
         {"other micro-batches", 1, "--micro-batches 3: --file ../files/good has 2",
          "--file ../files/good --micro-batches 3"},
         {"costs that are none", 1, "1,2 must be three numbers F,I,W", "--costs 1,2"},
         {"costs of nothing", 1, "0,0,0 must be three numbers F,I,W that are not all 0", "--costs 0,0,0"},
         {"a rank that there is not", 1, "--slow-rank 4=1.5: there are ranks 0 to 3", "--slow-rank 4=1.5"},
         {"a slow rank twice", 1, "--slow-rank: 0=2,0=3 has rank 0 twice", "--slow-rank 0=2,0=3"},
         {"a slow rank without a factor", 1, "2 must be RANK=TIMES", "--slow-rank 2"},
         {"a rank that takes no time", 1, "1=0 must be RANK=TIMES", "--slow-rank 1=0"},
         {"more ranks than are simulated", 1, "--file ../files/many: has 5000 lines of steps; at most 512",
          "--file ../files/many"},
         {"too many passes in all", 1,
          "--steps 1000: more than 2000000 passes in all; a training step has 8000 (try 250)",
          "--name 1f1b --micro-batches 1000 --steps 1000"},
         {"too few micro-batches", 1, "7 micro-batches are fewer than 8 on --stages 4 (try 8, or zb-v)",
          "--name dualpipe-v --micro-batches 7"},
         {"an output of no schedule", 1, "--csv: needs a schedule", "--csv a.csv"},
         {"a drawing where a folder is", 1, "--draw ../files: is a folder (must name a file)",
          "--file ../files/good --draw ../files"},
         {"one file for two", 1, "--write", "--file ../files/good --write ../files/good"},
         {"a drawing where none can be", 1, "--draw nowhere/x.png", "--file ../files/good --draw nowhere/x.png"}});
}

TEST_CASE("06") {
    expect_refused(
        Workplace(), "06_context_parallel", kChapter,
        {{"a sequence that does not divide", 2,
          "--cp 2 --cp-algorithm ring: --seq-len 127 is not divisible by 2 (try --seq-len 128)",
          "--cp-algorithm ring --seq-len 127"},
         {"a sequence that zigzag cannot divide", 2,
          "--cp 2 --cp-algorithm zigzag: --seq-len 130 is not divisible by 2 x 2 (try --seq-len 132)", "--seq-len 130"},
         {"a group that does not divide", 4, "--cp 4 is not divisible by --ulysses-size 3 (try --ulysses-size 2)",
          "--cp-algorithm hybrid --ulysses-size 3"},
         {"a group of another algorithm", 2,
          "--ulysses-size 2: --cp-algorithm zigzag has no such groups (try --cp-algorithm hybrid)", "--ulysses-size 2"},
         {"an algorithm that is none", 2, "--cp-algorithm|zigzag|ulysses|gather", "--cp-algorithm star"},
         {"a sequence that gather cannot divide", 2,
          "--cp 2 --cp-algorithm gather: --seq-len 130 is not divisible by 2 x 2 (try --seq-len 132)",
          "--cp-algorithm gather --seq-len 130"},
         {"more context-parallel ranks than there are", 2,
          "--cp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --cp 2)", "--cp 4"},
         {"--cp and --dp unlike the ranks", 4,
          "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)", "--cp 2 --dp 4"},
         {"--cp of nothing", 2, "--cp|integer >= 1", "--cp 0"}});
}

TEST_CASE("07") {
    expect_refused(
        Workplace(), "07_fp8", kChapter,
        {{"a recipe that is none", 1, "--fp8: mx is unknown|off|current|delayed|rowwise|blockwise", "--fp8 mx"},
         {"an optimizer that is none", 1, "--optimizer|adamw|adamw8bit", "--optimizer sgd"},
         {"inputs that do not divide by 16", 1,
          "--fp8-strict on|q, k, v: 120 inputs (--hidden) on a rank are not divisible by 16 (try 128)",
          "--fp8-strict on --hidden 120 --heads 4"},
         {"inputs that do not divide by 128", 1,
          "--fp8 blockwise|down: 320 inputs (--ffn) on a rank are not divisible by 128 (try 384)",
          "--fp8-strict on --fp8 blockwise --ffn 320"},
         {"rows that do not divide", 1, "--fp8-strict on|rows of a micro-batch (--micro-batch x --seq-len)",
          "--fp8-strict on --seq-len 33 --global-batch 3"},
         {"tensor parallelism that does not divide", 3, "--heads 8 is not divisible by --tp 3", "--tp 3"},
         {"fp64 in 8 bits", 1, "--fp8 current|--dtype fp64|try --fp8 off", "--dtype fp64"},
         {"fp64 with 8-bit moments", 2, "--optimizer adamw8bit|--dtype fp64|try --optimizer adamw",
          "--dtype fp64 --fp8 off --optimizer adamw8bit"},
         {"a history of no steps", 1, "--fp8-history|integer from 1 to 65536", "--fp8-history 0"},
         {"a margin beyond the range", 1, "--fp8-margin", "--fp8-margin 99"}});
}

TEST_CASE("08: flags") {
    expect_refused(
        Workplace(), "08_3d_full", kShort,
        {{"copies that do not fit", 4, "4 ranks are not divisible by --tp 1 x --cp 1 x --pp 3 = 3 (try mpirun -np 6)",
          "--pp 3"},
         {"an axis longer than the ranks", 2, "--tp 999999937: there are 2 ranks", "--tp 999999937 --pp 999999937"},
         {"a spike that is none", 1, "--spike-z|must be a number > 0", "--spike-z 0"},
         {"gradients of a dry run", 1, "--noise-scale on: a dry run computes no gradients",
          "--dry-run --noise-scale on"},
         {"a world beyond all bounds", 999999938, "--fake-world 999999938: at most 1048576 ranks", "--dry-run"},
         {"heads that tp cannot divide", 3, "--heads 8 is not divisible by --tp 3", "--tp 3"},
         {"heads that tp leaves and Ulysses cannot divide", 6, "are not divisible by 3 (try",
          "--tp 2 --cp 3 --cp-algorithm ulysses --seq-len 120"},
         {"a sequence that cp and tp do not divide", 8,
          "--sequence-parallel on: --seq-len 132 / --cp 2 = 66 is not divisible by --tp 4 (try --seq-len 144)",
          "--tp 4 --cp 2 --sequence-parallel on --seq-len 132"},
         {"overlap with 8 bits", 2, "--tp-overlap on: not supported with --fp8 current",
          "--tp 2 --tp-overlap on --fp8 current"},
         {"layers that pp does not divide", 3, "--layers 4 is not divisible by --pp 3", "--pp 3"},
         {"an interleaved pipeline of one stage", 2, "--pipeline interleaved: needs at least two pipeline ranks",
          "--pipeline interleaved"},
         {"offload of nothing that is sharded", 2, "--offload|try --zero 1, 2 or 3", "--offload optimizer"},
         {"a dry run of an evaluation of nothing", 4, "--eval-every 1: --data|set --val-fraction",
          "--dry-run --eval-every 1 --val-fraction 0"},
         {"a dry run of what is there", 1, "--dry-run|--comm fake --fake-world N", "--dry-run"},
         {"fp64 in 8 bits", 1, "--fp8 delayed|--dtype fp64|try --fp8 off", "--dtype fp64 --fp8 delayed"},
         {"fp64 with 8-bit moments", 2, "--optimizer adamw8bit|--dtype fp64", "--dtype fp64 --optimizer adamw8bit"},
         {"a probe of what is not there", 4, "--probe on|try --probe off", "--probe on"},
         {"a load alarm without experts", 1, "--load-alarm 2: needs --experts N", "--load-alarm 2"},
         {"a load that no expert can have", 1, "--load-alarm 3|--experts 6 / --top-k 2 is the largest|try 2.33",
          "--experts 6 --load-alarm 3"},
         {"an unknown way to probe", 1, "--probe|maybe|off|on|strict", "--probe maybe"},
         {"saving one rank's part", 4, "--save-hf|--comm fake", "--save-hf d"}});
}

TEST_CASE("08: faults") {
    expect_refused(
        Workplace(), "08_3d_full", "--steps 3 --metrics m.jsonl",
        {{"an unknown kind", 1, "--inject melt:0:1: unknown kind|bitflip", "--inject melt:0:1"},
         {"a fault that is cut short", 1, "--inject kill:0: must be KIND:RANK:STEP", "--inject kill:0"},
         {"an empty one in a list", 1, "--inject : unknown kind", "--inject kill:0:1,"},
         {"a rank that is no number", 1, "--inject kill:one:1: valid ranks", "--inject kill:one:1"},
         {"a step that the run does not have", 1, "--inject kill:0:4: valid steps are 1 to 3", "--inject kill:0:4"},
         {"step 0", 1, "--inject kill:0:0: valid steps are 1 to 3", "--inject kill:0:0"},
         {"a parameter that does not exist", 1,
          "--inject nan:0:2:model.norm: the model has no parameter|its last lm_head.weight",
          "--inject nan:0:2:model.norm"},
         {"a wrong group without experts", 1, "--inject wrong-group:0:1: needs experts on several ranks|--ep 2",
          "--inject wrong-group:0:1"},
         {"a wrong group of one", 1, "--inject wrong-group:0:1: needs experts on several ranks|--ep 2",
          "--experts 8 --inject wrong-group:0:1"},
         {"a parameter of a fault that has none", 1,
          "--inject hang:0:2:lm_head.weight: only nan, wrong-sum, wrong-group, bitflip|try hang:0:2",
          "--inject hang:0:2:lm_head.weight"}});
}
