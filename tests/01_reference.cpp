// Reference runs: two equal runs compare equal, one altered gradient is named, and nothing that is NaN, missing or
// damaged passes.
#include "tests/reference_runs.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("what a reference holds: shapes, tokens, nine digits, the gradients before clipping") {
    const Folder folder;
    reference_run(folder / "a");
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder / "a")) names.push_back(file.path().filename().string());
    std::sort(names.begin(), names.end());
    EXPECT(names == std::vector<std::string>{"after_step_1.safetensors", "config.json", "gradients.safetensors",
                                             "initial.safetensors", "reference.json"});
    const auto json = ordered_json::parse(read_text(folder / "a/reference.json"));
    EXPECT(json["seq_len"] == 12);
    EXPECT(json["flags"]["seed"] == "1");
    EXPECT(json["model"] == ordered_json::parse(read_text(folder / "a/config.json")));
    REQUIRE(json["steps"].size() == 3);
    for (const auto& step : json["steps"]) {
        EXPECT(step["tokens"].size() == 4);
        for (const auto& sample : step["tokens"]) EXPECT(sample.size() == 13);
        EXPECT(step["loss"] == significant_digits(step["loss"]));
    }
    const SafetensorsFile gradients(folder / "a/gradients.safetensors");
    EXPECT(gradients.tensors().size() == 3 + 9 * 2);
    double squares = 0;
    for (const auto& [name, stored] : gradients.tensors()) {
        EXPECT(stored.dtype == DType::f32);
        Tensor values_of(stored.shape, DType::f32, Device::cpu);
        gradients.read(stored, values_of);
        squares += dot(values(values_of), values(values_of));
    }
    EXPECT(std::abs(std::sqrt(squares) / json["steps"][0]["grad_norm"].get<double>() - 1) <= 1e-6);
    EXPECT(std::sqrt(squares) > 1);  // or clipping is not tested
}

TEST_CASE("equal runs are equal, micro-batches agree, another seed does not") {
    const Folder folder;
    reference_run(folder / "a");
    reference_run(folder / "again");
    reference_run(folder / "micro", 1, 1);
    reference_run(folder / "seed", 2);
    reference_run(folder / "longer", 1, 4, 4);
    const Comparison same = compare_references(folder / "a", folder / "again");
    EXPECT(same.within(0));
    EXPECT(same.gradients.size() == 3 + 9 * 2);
    EXPECT(same.samples == 12);
    EXPECT(compare_references(folder / "a", folder / "micro").within(kReferenceTolerance));
    EXPECT(!compare_references(folder / "a", folder / "micro").within(0));
    const Comparison other = compare_references(folder / "a", folder / "seed");
    EXPECT(!other.same_tokens);
    EXPECT(!other.within(1e9));
    const Comparison longer = compare_references(folder / "a", folder / "longer");  // the common steps
    EXPECT(longer.within(kReferenceTolerance));
    EXPECT(longer.steps == 3);
    EXPECT(longer.not_checked.size() == 1);
    EXPECT_USAGE_ERROR(reference_run(folder / "none", 1, 4, 0), "--save-reference");
}

TEST_CASE("one altered gradient is named, and by how much; a NaN never passes") {
    const Folder folder;
    reference_run(folder / "a");
    reference_run(folder / "b");
    const std::string gradients = folder / "b/gradients.safetensors";
    poke(gradients, kAltered, 5, [](float g) { return g + 1e-3f; });
    Comparison c = compare_references(folder / "b", folder / "a");
    EXPECT(!c.within(kReferenceTolerance));
    EXPECT(c.gradients[0].name == kAltered);
    EXPECT(std::abs(c.gradients[0].relative * c.gradients[0].size / 1e-3 - 1) <= 1e-3);
    EXPECT(c.gradients[1].relative == 0);
    REQUIRE(c.beyond(kReferenceTolerance).size() == 2);  // and its weight, which does not follow from the gradient
    EXPECT(c.beyond(kReferenceTolerance)[1].starts_with("weight after step 1: " + kAltered));
    EXPECT(comparison_table(c, kReferenceTolerance).find("DIFFER:\n  gradient: " + kAltered + " at step 1 by ") !=
           std::string::npos);

    for (const char* side : {"b", "a"}) {
        poke(folder / (std::string(side) + "/gradients.safetensors"), "lm_head.weight", 7,
             [](float) { return std::nanf(""); });
        for (bool swapped : {false, true}) {
            c = swapped ? compare_references(folder / "a", folder / "b")
                        : compare_references(folder / "b", folder / "a");
            EXPECT(!c.within(1e30));
            EXPECT(c.gradients[0].name == "lm_head.weight");  // worse than the altered one
        }
    }
}

TEST_CASE("an altered weight, token, loss or norm does not pass either") {
    const Folder folder;
    reference_run(folder / "a");
    const auto altered = [&](const auto& alter) { return ::altered(folder, alter); };
    EXPECT(altered([](ordered_json&) {}).within(0));
    EXPECT(altered([](ordered_json& j) {
               j["steps"][2]["loss"] = j["steps"][2]["loss"].get<double>() * (1 + 1e-6);
           }).within(kReferenceTolerance));
    const Comparison loss =
        altered([](ordered_json& j) { j["steps"][2]["loss"] = j["steps"][2]["loss"].get<double>() * (1 + 1e-5); });
    EXPECT(!loss.within(kReferenceTolerance));
    EXPECT(loss.losses[0].name == "step 3");
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = 0.1; }).within(kReferenceTolerance));
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = nullptr; }).within(1e30));
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["tokens"][3][12] = 0; }).within(1e30));
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1].erase("loss"); }), "reference.json: steps[1]");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1]["loss"] = "x"; }), "reference.json: steps[1]");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = -1; }),
                       "steps[1] \"grad_norm\" is -1");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][0]["tokens"][0][0] = 110.9; }), "token 110.9");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"] = {{"0", j["steps"][0]}}; }), "\"steps\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["dtype"] = "fp16"; }), "\"dtype\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"] = ordered_json::array(); }), "\"steps\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["version"] = 3; }), "of version 1 or 2");
    write_text(folder / "b/reference.json", nested_lists(200'000));
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "reference.json: nested deeper than 64");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j = 3; }), "of version 1");

    (void)altered([](ordered_json&) {});
    poke(folder / "b/initial.safetensors", kAltered, 0, [](float w) { return w + 0.01f; });
    EXPECT(compare_references(folder / "b", folder / "a").weights[0].name == kAltered);
    EXPECT(!compare_references(folder / "b", folder / "a").within(kReferenceTolerance));
    fs::remove(folder / "b/gradients.safetensors");
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: cannot be read");
    EXPECT_USAGE_ERROR(compare_references(folder / "nowhere", folder / "a"), "nowhere/reference.json");
    SafetensorsWriter("--save-reference", folder / "b/gradients.safetensors", {}).commit();
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: has no tensors");
}

TEST_CASE("parameters that only one run has, or in another shape, are named and do not pass") {
    const Folder folder;
    reference_run(folder / "a");
    fs::copy(folder / "a", folder / "b");
    const auto write = [&](std::vector<StoredTensor> list) {
        SafetensorsWriter file("--save-reference", folder / "b/gradients.safetensors", list);
        for (const StoredTensor& stored : list) file.write(Tensor(stored.shape, DType::f32, Device::cpu));
        file.commit();
    };
    write({{"lm_head.weight", DType::f32, {16, 256}}, {"new", DType::f32, {2}}});
    const Comparison c = compare_references(folder / "a", folder / "b");
    EXPECT(!c.within(1e30));
    EXPECT(c.problems.size() == 3 + 9 * 2 + 1);  // 20 missing, one of another shape, one too many
    std::string all;
    for (const std::string& problem : c.problems) all += problem + "\n";
    EXPECT(all.find("\"lm_head.weight\" is (256, 16)") != std::string::npos);
    EXPECT(all.find("\"new\" is in") != std::string::npos);
    EXPECT(all.find("\"" + kAltered + "\" is in") != std::string::npos);
}

namespace {

// One step, with the flags of run a, from the same weights: what differs is hidden.
Comparison after_one_step(const AlterOptions& change, const AlterOptions& hidden) {
    const Folder folder;
    reference_run(folder / "a", 1, 4, 1, hidden ? change : AlterOptions(), {});
    reference_run(folder / "b", 1, 4, 1, change, hidden);
    return compare_references(folder / "b", folder / "a");
}

// Replaces every weight of a run's file: change(before step 1, after step 1), in the run's dtype.
void replace_weights(const std::string& dir, DType dtype, const std::function<double(double, double)>& change) {
    std::vector<StoredTensor> list;
    std::vector<Tensor> tensors;
    const SafetensorsFile before(dir + "/initial.safetensors"), after(dir + "/after_step_1.safetensors");
    for (const auto& [name, stored] : after.tensors()) {
        Tensor x({stored.size()}, DType::f64, Device::cpu), y = Tensor::like(x);
        before.read(before.tensors().at(name), x);
        after.read(stored, y);
        for (int64_t i = 0; i < y.size(); ++i) y.data<double>()[i] = change(x.data<double>()[i], y.data<double>()[i]);
        list.push_back({name, dtype, stored.shape});
        tensors.push_back(y);
    }
    SafetensorsWriter file("--save-reference", dir + "/after_step_1.safetensors", list);
    for (const Tensor& values : tensors) file.write(values);
    file.commit();
}

bool only_updates_differ(const Comparison& c, double tolerance) {
    const std::vector<std::string> beyond = c.beyond(tolerance);
    INFO(comparison_table(c, tolerance));
    return beyond.size() == 1 && beyond[0].starts_with("weight after step 1: ");
}

}  // namespace

TEST_CASE("weights after step 1: a wrong decay, clipping or master copy does not pass; rounding does") {
    const AlterOptions small_step = [](TrainOptions& o) { o.lr = 1e-4; };
    EXPECT(after_one_step(small_step, [](TrainOptions&) {}).within(0));
    EXPECT(only_updates_differ(after_one_step(small_step, [](TrainOptions& o) { o.weight_decay = 0.05; }),
                               kReferenceTolerance));
    const AlterOptions large_eps = [](TrainOptions& o) { o.eps = 1e-4; };
    EXPECT(only_updates_differ(after_one_step(large_eps, [](TrainOptions& o) { o.clip = 0; }), kReferenceTolerance));
    EXPECT(only_updates_differ(after_one_step(large_eps, [](TrainOptions& o) { o.eps = 1e-5; }), kReferenceTolerance));

    for (const DType dtype : {DType::f32, DType::bf16}) {
        const Folder folder;
        const AlterOptions of_dtype = [&](TrainOptions& o) {
            o.dtype = name_of(dtype), o.grad_dtype = dtype == DType::bf16 ? "bf16" : "fp32";
            o.warmup_steps = 0, o.lr_schedule = "constant";
        };
        reference_run(folder / "a", 1, 4, 1, of_dtype);
        reference_run(folder / "micro", 1, 2, 1, of_dtype);
        const double tolerance = compare_references(folder / "a", folder / "a").default_tolerance();
        EXPECT(tolerance == (dtype == DType::bf16 ? 2e-2 : 5e-6));
        EXPECT(compare_references(folder / "micro", folder / "a").within(tolerance));
        for (const char* name : {"a/gradients.safetensors", "a/after_step_1.safetensors"}) {
            const SafetensorsFile file(folder / name);
            EXPECT(file.tensors().size() == 3 + 9 * 2);
            for (const auto& [_, stored] : file.tensors()) EXPECT(stored.dtype == dtype);
        }
        const auto with = [&](const std::function<double(double, double)>& change) {
            (void)altered(folder, [](ordered_json&) {});
            replace_weights(folder / "b", dtype, change);
            return compare_references(folder / "b", folder / "a");
        };
        EXPECT(with([](double, double after) { return after; }).within(0));
        EXPECT(only_updates_differ(with([](double before, double) { return before; }), tolerance));  // no update
        EXPECT(only_updates_differ(with([](double before, double after) { return after - before; }), tolerance));
        EXPECT(only_updates_differ(with([](double, double) { return NAN; }), tolerance));
    }
}

TEST_CASE("weights after step 1: a gradient that rounding turns round explains its weight, and only that") {
    const Folder folder;
    reference_run(folder / "a", 1, 4, 1);
    const float tiny = 1e-7f;  // of a gradient whose norm is about 1
    const double lr = TrainOptions().lr / TrainOptions().warmup_steps;
    (void)altered(folder, [](ordered_json&) {});
    poke(folder / "a/gradients.safetensors", kAltered, 5, [&](float) { return tiny; });
    poke(folder / "b/gradients.safetensors", kAltered, 5, [&](float) { return -tiny; });
    const double norm = ordered_json::parse(read_text(folder / "a/reference.json"))["steps"][0]["grad_norm"];
    const double u = tiny / (tiny + 1e-8 / std::min(1.0, 1 / (norm + 1e-6)));
    poke(folder / "a/after_step_1.safetensors", kAltered, 5, [&](float) { return float(0.1 - lr * u); });
    poke(folder / "b/after_step_1.safetensors", kAltered, 5, [&](float) { return float(0.1 + lr * u); });
    EXPECT(compare_references(folder / "b", folder / "a").within(kReferenceTolerance));
    poke(folder / "b/gradients.safetensors", kAltered, 5, [&](float) { return tiny; });
    const Comparison c = compare_references(folder / "b", folder / "a");
    EXPECT(only_updates_differ(c, kReferenceTolerance));
    EXPECT(c.updates[0].name == kAltered);
}

TEST_CASE("the tolerance and the steps that are judged follow the dtype; later drift is told, not judged") {
    const Folder folder;
    reference_run(folder / "a", 1, 4, 5);
    const auto set_loss = [](ordered_json& j, size_t step, double factor) {
        j["steps"][step - 1]["loss"] = j["steps"][step - 1]["loss"].get<double>() * factor;
    };
    Comparison c = altered(folder, [&](ordered_json& j) { set_loss(j, 5, 1.5); });
    EXPECT(c.default_tolerance() == 5e-6);
    EXPECT(c.within(kReferenceTolerance));
    EXPECT(std::abs(c.later_losses[0].relative - 0.5) <= 1e-9);
    EXPECT(comparison_table(c, kReferenceTolerance).find("worst 0.5, step 5") != std::string::npos);
    c = altered(folder, [&](ordered_json& j) { set_loss(j, 4, 1.5), set_loss(j, 3, 1.25); });
    EXPECT(comparison_table(c, kReferenceTolerance)
               .ends_with("DIFFER:\n  loss: step 4 by 0.5, more than 5e-06 (2 of 4 exceed it)\nin the order of "
                          "computation:\n  forward: right (the loss of step 1)\n  first wrong loss: step 3\n"));

    // fp64 against fp64: two steps, and all where the flags of both are gentle; fp64 against fp32 is fp32
    auto original = ordered_json::parse(read_text(folder / "a/reference.json"));
    const auto fp64 = [&](double lr, size_t step, double factor, const char* other = "fp64") {
        original["dtype"] = other, original["flags"]["lr"] = fmt::format("{}", lr);
        write_text(folder / "a/reference.json", original.dump());
        return altered(folder, [&](ordered_json& j) { j["dtype"] = "fp64", set_loss(j, step, factor); });
    };
    EXPECT(fp64(3e-3, 2, 1).default_tolerance() == 1e-10);
    EXPECT(fp64(3e-3, 2, 1).within(0));
    for (const double lr : {3e-3, 1e-2}) {
        EXPECT(fp64(lr, 2, 1 + 1e-11).within(1e-10));
        EXPECT(!fp64(lr, 2, 1 + 1e-9).within(1e-10));
    }
    EXPECT(!fp64(3e-3, 3, 1 + 1e-9).within(1e-10));
    EXPECT(!fp64(3e-3, 5, 1 + 1e-9).within(1e-10));
    EXPECT(fp64(1e-2, 3, 1 + 1e-9).within(1e-10));
    original["flags"]["warmup-steps"] = "19";
    EXPECT(fp64(3e-3, 3, 1 + 1e-9).within(1e-10));
    original["flags"]["warmup-steps"] = "20";
    EXPECT(fp64(3e-3, 2, 1 + 1e-9, "fp32").default_tolerance() == 5e-6);
    EXPECT(significant_digits(1.0 / 3, DType::f64) == 1.0 / 3);
    EXPECT(significant_digits(1.0 / 3, DType::f32) == 0.333333333);

    // version 1: without the weights after step 1
    fs::remove(folder / "a/after_step_1.safetensors");
    original["version"] = 1, original["dtype"] = "fp32";
    write_text(folder / "a/reference.json", original.dump());
    EXPECT(altered(folder, [&](ordered_json&) {}).within(0));
}

TEST_CASE("initial weights of one dtype must be equal, whatever the tolerance") {
    const Folder folder;
    reference_run(folder / "a");
    (void)altered(folder, [](ordered_json&) {});
    poke(folder / "b/initial.safetensors", kAltered, 0, [](float w) { return std::nextafter(w, 1.0f); });
    const Comparison c = compare_references(folder / "b", folder / "a");
    REQUIRE(c.beyond(1).size() == 1);
    EXPECT(c.beyond(1)[0].starts_with("initial weight: " + kAltered));
}
