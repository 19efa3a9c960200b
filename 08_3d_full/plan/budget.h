#pragma once
// What a run takes: time, money, storage; how many tokens a model of this size should see, and how large a
// batch may be.
namespace train70b {

constexpr double kSecondsPerDay = 86400;

struct RunCost {
    double days = 0, gpu_hours = 0, price = 0;  // price: in the unit of price_per_gpu_hour
};
double tokens_per_day(double tokens_per_s);  // of all devices
// tokens_per_s: of all `gpus` together. No failures: see best_interval() for what they cost.
RunCost run_cost(double tokens, double tokens_per_s, double gpus, double price_per_gpu_hour);

// Bytes of a checkpoint, and of the weights alone. bytes_per_parameter: 12, or 6.03 with 8-bit moments.
double checkpoint_bytes(double parameters, double bytes_per_parameter = 12);

// ---- Chinchilla (Hoffmann et al. 2022) ------------------------------------------------------------------------------
// Training takes C = 6 N D FLOPs. Approaches 1 and 2 of the paper find N and D growing alike, at about 20 tokens per
// parameter, so N = sqrt(C / 120). Approach 3 fits the loss of N parameters and D tokens,
//     L(N, D) = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28
// which is least, at a given C, where  N = G (C/6)^a,  D = (C/6)^b / G,  a = 0.28/0.62,  b = 0.34/0.62,
// G = (0.34 * 406.4 / (0.28 * 410.7))^(1/0.62). It gives smaller models and more tokens than 20 per parameter. These
// are the constants as printed, rounded in a way that biases the optimum (Besiroglu et al. 2024): at 5.76e23 FLOPs it
// is 32 B parameters with 93 tokens each, where the paper's approach 3 gives 40 B. Besiroglu et al. fit data
// reconstructed from the paper's plots and find about 20.
constexpr double kTokensPerParameter = 20;
struct ModelAndTokens {
    double parameters = 0, tokens = 0;
};
ModelAndTokens chinchilla_by_ratio(double flops, double tokens_per_parameter = kTokensPerParameter);
ModelAndTokens chinchilla_by_fit(double flops);
double chinchilla_loss(double parameters, double tokens);  // nats per token, of the paper's data

// ---- the critical batch size ----------------------------------------------------------------------------------------
// A run with batches of B takes  S = S_min (1 + B_crit / B)  steps and  E = E_min (1 + B / B_crit)  tokens: at
// B = B_crit twice the fewest steps and twice the fewest tokens. The gradient noise scale B_noise = tr(Sigma) / |G|^2
// predicts B_crit approximately (McCandlish et al. 2018; chapter 01's --noise-scale measures it); here it is B_crit.
double steps_factor(double batch, double noise_scale);   // S / S_min
double tokens_factor(double batch, double noise_scale);  // E / E_min
// Kaplan et al. 2020, table 5 and figure 10, a fit by the loss: B_crit = 2.1e8 L^-(1/0.21), in tokens. (Equation 1.4
// rounds to 2e8.) For their data and vocabulary; DeepSeek and others find other constants. The paper is not confident
// in it far outside the losses that it explored (appendix C): the planner extrapolates.
double kaplan_critical_batch(double loss);

}  // namespace train70b
