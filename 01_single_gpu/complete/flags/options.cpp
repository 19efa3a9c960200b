#include "01_single_gpu/complete/flags/options.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/core/say.h"
#include "01_single_gpu/ops/matmul_autotune.h"

namespace train70b {

constexpr const char *kLatentRank = "--kv-lora-rank", *kDefaultData = "docs/data/corpus.txt";

std::vector<std::string> ModelFlags::names() {
    std::vector<std::string> list = {"--model",           "--layers",   "--hidden",       "--heads", "--kv-heads",
                                     "--head-dim",        "--qkv-bias", "--qk-norm",      "--ffn",   "--vocab",
                                     "--tied-embeddings", "--window",   "--window-every", "--sinks"};
    list.insert(list.end(), {kLatentRank, "--q-lora-rank", "--qk-rope-head-dim", "--mtp"});
    list.insert(list.end(), ExpertFlags::names().begin(), ExpertFlags::names().end());
    return list;
}

void ModelFlags::add_to(Flags& flags) {
    const Check count = integer_from(1);
    flags.group("Model");
    flags.add("--model", model_, "model preset", one_of(preset_names()));
    const auto add = [&](const char* flag, auto LlamaConfig::*member, const char* text, const Check& check) {
        auto& value = values_.*member;
        replace_[flag] = [&value, member](LlamaConfig& model) { model.*member = value; };
        if constexpr (std::is_same_v<decltype(value), bool&>)
            flags.add_switch(flag, value, text).default_text("");
        else
            flags.add(flag, value, text, check).default_text("");
    };
    add("--layers", &LlamaConfig::layers, "number of transformer blocks", integer_from(1, kMaxLayers));
    add("--hidden", &LlamaConfig::hidden, "hidden size", count);
    add("--heads", &LlamaConfig::heads, "number of query heads", count);
    add("--kv-heads", &LlamaConfig::kv_heads, "number of key/value heads; must divide --heads", count);
    add("--head-dim", &LlamaConfig::head_size, "size of a head [default: --hidden / --heads]", count);
    add("--qkv-bias", &LlamaConfig::qkv_bias, "biases of q, k and v, as in Qwen2 [default: the model's]", {});
    add("--qk-norm", &LlamaConfig::qk_norm, "RMSNorm of each head of q and k, as in Qwen3 [default: the model's]", {});
    add("--ffn", &LlamaConfig::ffn, "inner size of the MLP", count);
    add("--vocab", &LlamaConfig::vocab, "vocabulary size (256 for text, whose tokens are bytes)", count);
    add("--tied-embeddings", &LlamaConfig::tied,
        "use the embedding's matrix for the head as well [default: the model's]", {});
    flags.add("--window", values_.window, "keys that a query sees, itself included; 0: all", integer_from(0));
    flags.add("--window-every", window_every_, "of so many layers the last sees all; 1: none does", count);
    add("--sinks", &LlamaConfig::sinks,
        "a learned logit per head in attention's softmax, as in gpt-oss [default: the model's]", {});
    add("--mtp", &LlamaConfig::multi_token,
        "one more block predicts the token after the next, as in DeepSeek-V3 [default: the model's]", {});
    const Check rank = integer_from(0, 1 << 20);
    Latent& latent = values_.latent;
    flags.add(kLatentRank, latent.kv_rank,
              "latent attention, as in DeepSeek-V3: size of keys' and values' latent; 0: none", rank);
    flags.add("--q-lora-rank", latent.q_rank, "latent attention: size of the queries' latent; 0: none", rank);
    flags
        .add("--qk-rope-head-dim", latent.rope_dim,
             "latent attention: numbers of q and k that RoPE rotates, beside --head-dim others [default: half of it]",
             count)
        .default_text("head-dim / 2");

    experts.add_shape(flags);
}

LlamaConfig ModelFlags::shape(const Flags& flags) const {
    LlamaConfig model = preset(model_);
    for (const auto& [flag, replace] : replace_)
        if (flags.given(flag)) replace(model);
    const bool own_kv_heads = flags.given("--kv-heads");
    if (flags.given("--heads") && !own_kv_heads) model.kv_heads = std::gcd(model.heads, model.kv_heads);
    model.window = values_.window;
    if (window_every_ > 1 && model.window == 0)
        usage_error("--window-every {}: needs --window N, the keys that a query sees", window_every_);
    for (int64_t layer = 0; layer < model.layers && window_every_ > 1 && window_every_ <= model.layers; ++layer)
        model.windowed.push_back((layer + 1) % window_every_ != 0);
    for (const char* flag : {"--q-lora-rank", "--qk-rope-head-dim"})
        if (flags.given(flag) && values_.latent.kv_rank == 0)
            usage_error("{}: needs {} N, the size of keys' and values' latent", flag, kLatentRank);
    model.latent = values_.latent;
    if (model.is_latent()) {
        if (!own_kv_heads) model.kv_heads = model.heads;
        if (model.latent.rope_dim == 0) model.latent.rope_dim = std::max<int64_t>(model.value_dim() / 4, 1) * 2;
    }
    model.experts = experts.shape(model, flags);
    check_config(model);
    return model;
}

CommandLine::CommandLine(const std::string& description, TrainOptions& o) : Flags(description), options_(o) {
    const Check count = integer_from(1), count0 = integer_from(0);
    const Check positive = real_number(0, kLargest, false), positive0 = real_number(0, kLargest);
    const Check any_positive0 = real_number(0, kInfinity);

    model_.add_to(*this);
    add_input(
        "--load-hf", o.load_hf,
        "DIR: load shape and weights of a Hugging Face Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, dots.llm1 or "
        "DeepSeek-V3");
    add("--hf-ignore", o.hf_ignore,
        "keys of its config.json that are not supported, to go on without them; vocab_size: train on text, whose bytes "
        "are then token ids, whatever the vocabulary [default: none]",
        {.problem = {}, .name = "KEY"});
    add("--init-std", o.init_std, "standard deviation of the initial weights", positive);
    add("--seed", o.seed, "random seed of initial weights and batches", integer_from(0, INT64_MAX));

    group("Data");
    add_input("--data", o.data,
              fmt::format("PATH: text file, folder of text, or .bin token shards; several, with weights that sum to 1: "
                          "PATH:WEIGHT,PATH:WEIGHT,... [default: {}]",
                          kDefaultData));
    add("--seq-len", o.seq_len, "tokens per sequence", count);
    add("--micro-batch", o.micro_batch, "sequences per micro-batch [default: --global-batch / data-parallel ranks]",
        count)
        .default_text("global / ranks");
    add("--global-batch", o.global_batch, "sequences per optimizer step", count);
    add("--val-fraction", o.val_fraction,
        "fraction of the data held out for validation [default: 0.1 for text, 0 for shards]", real_number(0, 0.9))
        .default_text("0.1 of a text, 0 of shards");
    add("--document-token", o.document_token,
        "token that ends a document: positions restart behind it, and attention stops [default: none]",
        integer_from(0));
    add_switch("--mask-document-ends", o.mask_document_ends,
               "do not train to predict the first token of a document from the document token before it");
    add("--eval-every", o.eval_every, "steps between evaluations of the validation loss; 0: never", count0);

    add("--sample-every", o.sample_every, "steps between printed continuations of the prompt; 0: never", count0);
    add("--prompt", o.prompt, "text to continue [default: the first tokens of the held-out data]",
        {.problem = {}, .name = "TEXT"});

    group("Training");
    add("--steps", o.steps, "number of optimizer steps", count0);
    add("--lr", o.lr, "peak learning rate", any_positive0);
    add("--min-lr", o.min_lr, "final learning rate [default: --lr / 10]", any_positive0).default_text("lr / 10");
    add("--warmup-steps", o.warmup_steps, "steps of linear warmup", count0);
    add("--lr-schedule", o.lr_schedule,
        help_of("learning-rate schedule after the warmup [default: cosine]", lr_shapes()),
        one_of(names_of(lr_shapes())));
    add("--weight-decay", o.weight_decay, "AdamW: decoupled weight decay, of matrices only", positive0);
    add("--beta1", o.beta1, "AdamW: decay rate of exp_avg", real_number(0, 0.999999));
    add("--beta2", o.beta2, "AdamW: decay rate of exp_avg_sq", real_number(0, 0.999999));
    add("--eps", o.eps, "AdamW: added to the denominator", real_number(0, 1, false));
    add("--clip", o.clip, "maximum gradient norm; 0: no clipping", any_positive0);
    add_switch("--skip-step", o.skip_step,
               "no update where loss or gradient norm is 6 standard deviations above the mean of the last 128 updates "
               "(from the 65th on); what is not finite still ends the run");
    add("--z-loss", o.z_loss, "add this times the mean square of log(sum of exp(logits)) to the loss", positive0);
    add("--mtp-loss", o.multi_token_weight, "--mtp on: factor of its loss", positive0);
    model_.experts.add_balance(*this);
    add("--mup", o.mup, "muP: --hidden of the model that --lr and --init-std were tuned for [default: none]", count);

    group("Precision, memory");
    add("--dtype", o.dtype,
        "dtype of weights and activations; fp16: of products alone, the rest is fp32; fp16, fp64: CPU only",
        one_of(names_of(kTrainDTypes)));
    add("--grad-dtype", o.grad_dtype, "dtype of gradients; --dtype fp64 implies fp64", one_of(names_of(kGradDTypes)));
    add("--loss-scale", o.loss_scale, "with --dtype fp16: factor of the loss in the backward pass; 0: dynamic",
        real_number(0, 1e10));
    add("--recompute", o.recompute, "activations to recompute in the backward pass", one_of(recompute_names()));
    add("--recompute-every", o.recompute_every, "recompute in every N-th block only; the others keep everything",
        integer_from(1, kMaxLayers));
    add("--loss-chunk", o.loss_chunk,
        "rows of logits at a time, with their gradients computed in the forward pass; 0: all of a micro-batch", count0);
    add("--device", o.device, "device; auto: cuda if available", one_of(names_of(kDevices)));
    add("--attention", o.attention, "attention's kernels on a GPU; auto: cuDNN's where it has them, else our own",
        one_of(names_of(kAttention)));
    add("--matmul", o.matmul, "kernels of matrix products on a GPU; auto: cuBLASLt's, else our own (for learning)",
        one_of(names_of(kMatmul)));
    add_output("--matmul-autotune", o.matmul_autotune,
               "FILE: of cuBLASLt's algorithms for each product take the fastest, which FILE has or gets [default: "
               "its heuristic's first]");

    group("Output");
    add_output("--metrics", o.metrics, "FILE.jsonl: write metrics, one JSON line per step");
    add_output("--trace", o.trace, "FILE.json: write Chrome trace events, of all ranks on one clock");
    add_output("--memory-timeline", o.memory_timeline,
               "FILE.csv: write the memory by kind after every allocation and release");
    add_output("--save-hf", o.save_hf, "DIR: save the trained model in Hugging Face's format", hf_files());
    add_output(
        "--save-reference", o.save_reference, "DIR: save a reference run for build/bin/compare",
        {"config.json", "initial.safetensors", "gradients.safetensors", "after_step_1.safetensors", "reference.json"});
}

static void check_fp16(const TrainOptions& o, bool scale_given, bool overlaps) {
    if (!o.fp16()) {
        if (scale_given) usage_error("--loss-scale: needs --dtype fp16, not {}", o.dtype);
        return;
    }
    if (o.device == "cuda")
        usage_error("--dtype fp16: not supported with --device cuda (try --device cpu, or --dtype bf16)");
    for (const auto& [flag, given] : {std::pair("--experts", o.model.is_sparse()),
                                      {"--kv-lora-rank", o.model.is_latent()},
                                      {"--mtp on", o.model.multi_token},
                                      {"--save-reference", !o.save_reference.empty()},
                                      {"--tp-overlap on", overlaps}})
        if (given) usage_error("--dtype fp16: not supported with {} (try --dtype bf16)", flag);
}

void CommandLine::parse(int argc, char** argv) {
    Flags::parse(argc, argv);
    TrainOptions& o = options_;
    o.model = model_shape();
    if (o.document_token && *o.document_token >= o.model.vocab)
        usage_error("--document-token {} is outside the vocabulary (must be at most {}; newline in text: 10)",
                    *o.document_token, o.model.vocab - 1);
    record("--tied-embeddings", o.model.tied ? "on" : "off");
    if (!o.prompt.empty() && o.sample_every == 0 && values().value("generate", std::string("0")) == "0")
        usage_error("--prompt: nothing continues it without --sample-every N");
    if (o.min_lr < 0) record("--min-lr", fmt::format("{}", o.min_lr = o.lr / 10));
    if (o.min_lr > o.lr) usage_error("--min-lr {} must be at most --lr {}", o.min_lr, o.lr);
    if (given("--warmup-steps") && o.warmup_steps >= o.steps && o.steps > 0)
        say("--warmup-steps {} of --steps {}: the learning rate only grows, to {:.3g} of --lr {}\n", o.warmup_steps,
            o.steps, double(o.steps) / double(o.warmup_steps), o.lr);
    if (o.dtype == "fp64") {
        if (given("--grad-dtype") && o.grad_dtype != "fp64")
            usage_error("--grad-dtype {}: must be fp64 with --dtype fp64", o.grad_dtype);
        if (o.device == "cuda")
            usage_error("--dtype fp64: not supported with --device cuda (try --device cpu, or --dtype fp32)");
        record("--grad-dtype", o.grad_dtype = "fp64");
    } else if (o.grad_dtype == "fp64") {
        usage_error("--grad-dtype fp64: not supported with --dtype {} (try --grad-dtype fp32, or --dtype fp64)",
                    o.dtype);
    }
    check_fp16(o, given("--loss-scale"), values().value("tp-overlap", std::string()) == "on");
    if (o.recompute_every > 1 && o.recompute == "none")
        usage_error("--recompute-every {}: nothing is recomputed with --recompute none (try --recompute full)",
                    o.recompute_every);
    if ((o.dtype == "fp32" || o.fp16()) && o.grad_dtype == "bf16")
        usage_error("--grad-dtype bf16: gradients must not be less precise than weights (try --dtype bf16)");
    if (o.device == "cuda" && !why_no_cuda().empty())
        usage_error("--device cuda: {} (try --device cpu)", why_no_cuda());
    attention_by = o.attention_by();
    if (attention_by == AttentionBy::cudnn)
        if (const std::string why = why_not_cudnn(o.device_kind(), o.llama().dtype, o.model.head_dim(), o.masks_keys());
            !why.empty())
            usage_error("--attention cudnn: {} (try --attention auto)", why);
    matmul_by = o.matmul_by();
    // The gradients of a router are products of fp32.
    const DType narrow = o.model.is_sparse() ? DType::f32 : o.llama().dtype;
    if (const std::string why = why_not_matmul(matmul_by, o.device_kind(), narrow); !why.empty())
        usage_error("--matmul {}", why);
    if (!o.matmul_autotune.empty() && (o.device_kind() == Device::cpu || matmul_by != MatmulBy::cublaslt))
        usage_error("--matmul-autotune {}: of cuBLASLt's products (try --device cuda --matmul auto, or no such flag)",
                    o.matmul_autotune);
    if (o.mask_document_ends && !o.document_token)
        usage_error("--mask-document-ends on: needs --document-token N, the token that ends a document");
    if (o.data.empty() && !given("--data")) o.data = repository_file(kDefaultData);
    if (o.mup && !o.load_hf.empty())
        usage_error("--mup {}: not allowed with --load-hf, whose weights and logits are those of {}", *o.mup,
                    o.load_hf);
    if (given("--mtp-loss") && !o.model.multi_token) usage_error("--mtp-loss: needs --mtp on");
    if (o.mup && o.model.is_latent())
        usage_error("--mup {}: not supported with {} {}, which has products of two widths", *o.mup, kLatentRank,
                    o.model.latent.kv_rank);
    model_.experts.read_balance(o.model, *this);
    if (!o.save_hf.empty()) check_hf_attention(o.model, "--save-hf");
    if (!o.load_hf.empty() && !given("--lr") && o.steps > 0)
        o.notes += fmt::format("--lr {} is the default, for new weights (for trained ones try --lr 1e-5)\n", o.lr);
    if (!o.load_hf.empty() && o.model.is_sparse() && !given("--aux-loss")) {
        const double aux_loss = o.model.experts.balance.aux_loss;
        record("--aux-loss", fmt::format("{}", aux_loss));
        o.notes += fmt::format("--aux-loss {}, the router_aux_loss_coef of {}/config.json{}\n", aux_loss, o.load_hf,
                               aux_loss > 0 ? " (the loss: docs/appendix.md)" : ", or none there");
    }
    if (o.load_hf.empty() && given("--hf-ignore")) usage_error("--hf-ignore: needs --load-hf DIR");
    check_path_flags();
    matmul_autotune = o.matmul_autotune;
    if (!matmul_autotune.empty() && o.device_kind() == Device::cuda) tuned_algorithm("");  // is the file all right?
}

Flags::Flag CommandLine::add_output(const std::string& flag, std::string& path, const std::string& text,
                                    std::vector<std::string> files) {
    path_flags_.push_back({flag, &path, true, std::move(files)});
    return add_path(flag, path, text);
}

Flags::Flag CommandLine::add_input(const std::string& flag, std::string& path, const std::string& text) {
    path_flags_.push_back({flag, &path, false, {}});
    return add_path(flag, path, text);
}

Flags::Flag CommandLine::add_path(const std::string& flag, std::string& path, const std::string& text) {
    const size_t colon = text.find(": ");
    CHECK(colon != text.npos, "{}: {}", flag, text);
    return add(flag, path, text.substr(colon + 2), {.problem = {}, .name = text.substr(0, colon)});
}

void CommandLine::check_path_flags() const {
    namespace fs = std::filesystem;
    std::vector<PathUse> uses;
    for (const auto& [flag, path, output, files] : path_flags_) {
        if (path->empty() && given(flag)) usage_error("{}: empty path (must name a file or folder)", flag);
        if (path->empty()) continue;
        if (output) {
            for (const std::string& file : files) uses.push_back({flag, *path + "/" + file, true});
            if (files.empty()) uses.push_back({flag, *path, true});
            continue;
        }
        for (const std::string& input : flag == "--data" ? data_paths(*path) : std::vector{*path}) {
            std::error_code error;
            if (!fs::is_directory(input, error)) uses.push_back({flag, input, false});
            for (auto it = fs::recursive_directory_iterator(input, error); it != fs::recursive_directory_iterator();
                 it.increment(error))
                if (it->is_regular_file(error)) uses.push_back({flag, it->path().string(), false});
        }
    }
    check_paths(uses);
}

LlamaConfig CommandLine::model_shape() const {
    const TrainOptions& o = options_;
    if (!o.load_hf.empty()) {
        for (const std::string& flag : ModelFlags::names())
            if (given(flag) && flag != ExpertFlags::kCapacity)
                usage_error("{}: not allowed with --load-hf, because {}/config.json has the shape", flag, o.load_hf);
        LlamaConfig model = read_hf_config(o.load_hf, o.hf_ignore);
        model_.experts.add_capacity(model, *this, o.load_hf);
        return model;
    }
    return model_.shape(*this);
}

void CommandLine::check_batches(int64_t data_ranks) {
    TrainOptions& o = options_;
    if (o.micro_batch == 0) {
        if (o.global_batch % data_ranks != 0)
            usage_error("--global-batch {} is not divisible by {} data-parallel ranks (try --global-batch {})",
                        o.global_batch, data_ranks, (o.global_batch / data_ranks + 1) * data_ranks);
        record("--micro-batch", fmt::format("{}", o.micro_batch = o.global_batch / data_ranks));
    }
    const int64_t at_once = o.micro_batch * data_ranks;
    if (o.global_batch % at_once != 0)
        usage_error(
            "--global-batch {} is not divisible by --micro-batch {} x {} data-parallel ranks (try --global-batch {})",
            o.global_batch, o.micro_batch, data_ranks, (o.global_batch / at_once + 1) * at_once);
}

}  // namespace train70b
