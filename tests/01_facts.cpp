// What compare tells beside its verdict: what contradicts, what was not checked, and where a difference begins.
#include "tests/reference_runs.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("what does not pass, and what is only told: files, learning rates, targets; settings, steps") {
    const Folder folder;
    reference_run(folder / "a");
    const auto same = altered(folder, [](ordered_json&) {});
    EXPECT(same.contradictions.empty());
    EXPECT(same.not_checked.empty());
    fs::remove(folder / "b/after_step_1.safetensors");
    for (const bool swapped : {false, true}) {
        const Comparison c = compare_references(folder / (swapped ? "a" : "b"), folder / (swapped ? "b" : "a"));
        EXPECT(!c.within(1e30));
        EXPECT(c.problems[0].ends_with("b/after_step_1.safetensors is missing"));
    }
    EXPECT(!altered(folder, [](ordered_json& j) {
                j["steps"][1]["lr"] = 7 * j["steps"][1]["lr"].get<double>();
            }).within(1e30));
    for (const bool all : {false, true}) {  // what stands for every next token, and without the first
        const Comparison c = altered(folder, [&](ordered_json& j) {
            for (auto& sample : j["steps"][0]["tokens"]) {
                auto& targets = j["steps"][0]["targets"].emplace_back(sample.begin() + 1, sample.end());
                if (!all) targets[0] = -1;
            }
        });
        EXPECT(c.within(0) == all);
    }
    const Comparison c = altered(folder, [](ordered_json& j) {
        j["flags"]["eps"] = "1e-3", j["model"]["rope_theta"] = 5e5;
        j["steps"].erase(1), j["steps"].erase(1);
    });
    EXPECT(c.within(0));
    EXPECT(c.contradictions.size() == 2);
    EXPECT(c.not_checked.size() == 2);  // two steps; moments
}

TEST_CASE("the facts: the place in the order of computation, multiples, the first wrong step") {
    const Folder folder;
    reference_run(folder / "a");
    const auto has = [](const Comparison& c, const std::string& line) {
        const std::vector<std::string> lines = facts(c, kReferenceTolerance);
        INFO(comparison_table(c, kReferenceTolerance));
        EXPECT(std::find(lines.begin(), lines.end(), line) != lines.end());
    };
    has(altered(folder, [](ordered_json& j) { j["steps"][1]["loss"] = 5; }), "first wrong loss: step 2");
    has(altered(folder, [](ordered_json& j) { j["steps"][0]["loss"] = 5; }), "first wrong loss: step 1");
    (void)altered(folder, [](ordered_json&) {});
    EXPECT(facts(compare_references(folder / "b", folder / "a"), kReferenceTolerance).empty());
    const std::string path = folder / "b/gradients.safetensors", block = "model.layers.1.";
    for (const char* name : {"self_attn.v_proj.weight", "input_layernorm.weight"})
        poke(path, block + name, 3, [](float g) { return g + 1; });
    const Comparison c = compare_references(folder / "b", folder / "a");
    has(c, "forward: right (the loss of step 1)");
    REQUIRE(facts(c, kReferenceTolerance).size() == 2);
    EXPECT(facts(c, kReferenceTolerance)[1].starts_with("backward: right down to " + block +
                                                        "self_attn.o_proj.weight; first wrong: " + block +
                                                        "self_attn.v_proj.weight; right after it: " + block));
    fs::copy(folder / "a/gradients.safetensors", path, fs::copy_options::overwrite_existing);
    std::string file = read_text(path);
    uint64_t header = 0;
    std::memcpy(&header, file.data(), 8);
    for (size_t at = 8 + header; at < file.size(); at += 4) {
        float gradient = 0;
        std::memcpy(&gradient, &file[at], 4);
        gradient *= 4;
        std::memcpy(&file[at], &gradient, 4);
    }
    write_text(path, file);
    has(compare_references(folder / "b", folder / "a"), "gradients: all 21 are 4 x the reference's, nothing else");
}
