// Adam and AdamW in one loop: gradient in (bf16 or fp32), master and moments in place, parameter out (bf16 or none).
//
// The arithmetic is that of torch's fused CPU kernel, operation by operation, so that results have its bits: where it
// multiplies and adds in one rounding, fmaf stands here, and the compiler is told to contract nothing by itself.
// Vectors are left to the compiler. No header but the standard library's: it is loaded by its C function alone.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#define NO_ELEMENT_READS_ANOTHERS _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_ELEMENT_READS_ANOTHERS _Pragma("GCC ivdep")
#endif

namespace {

inline float widen(float x) { return x; }

inline float widen(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// To the nearest, ties to even; NaN keeps a bit of its payload that is never cut off.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

}  // namespace

// As AdamPass of compiled_adam.py.
struct AdamPass {
    float scale;          // of the gradient
    float sign;           // -1 to maximize
    float mean_share;     // 1 - beta1
    float square_decay;   // beta2
    float square_share;   // 1 - beta2
    float root_of_bias;   // sqrt(1 - beta2^t)
    float eps;
    float negative_rate;  // -lr / (1 - beta1^t)
    float weights_kept;   // 1 - lr * weight_decay where that is apart from the gradient, else 1
    float decay;          // weight_decay where that is added to the gradient, else 0
};

namespace {

template <typename Grad, bool kOut, bool kCoupled, bool kLargest>
void pass(const AdamPass& a, size_t n, float* __restrict master, const Grad* grads, float* __restrict means,
          float* __restrict squares, float* __restrict largest, uint16_t* out) {
    // torch's lerp begins at the nearer end.
    const bool near_mean = std::fabs(a.mean_share) < 0.5f;
    const float share = near_mean ? a.mean_share : a.mean_share - 1.0f;
    // `out` may be where `grads` is: an element is read before it is written, and nobody reads another's.
    NO_ELEMENT_READS_ANOTHERS
    for (size_t i = 0; i < n; ++i) {
        float w = master[i];
        float g = (widen(grads[i]) * a.scale) * a.sign;
        if (kCoupled) {
            g = fmaf(w, a.decay, g);
        } else {
            w = w * a.weights_kept;
        }
        const float m0 = means[i];
        const float m = fmaf(share, g - m0, near_mean ? m0 : g);
        const float v = fmaf(a.square_share * g, g, a.square_decay * squares[i]);
        means[i] = m;
        squares[i] = v;
        float divisor = v;
        if (kLargest) {
            const float before = largest[i];
            divisor = (v > before || v != v) ? v : before;
            largest[i] = divisor;
        }
        w = w + (a.negative_rate * m) / (std::sqrt(divisor) / a.root_of_bias + a.eps);
        master[i] = w;
        if (kOut) {
            out[i] = to_bf16(w);
        }
    }
}

template <typename Grad, bool kOut, bool kCoupled>
void by_largest(const AdamPass& a, size_t n, float* w, const Grad* g, float* m, float* v, float* x, uint16_t* out) {
    x != nullptr ? pass<Grad, kOut, kCoupled, true>(a, n, w, g, m, v, x, out)
                 : pass<Grad, kOut, kCoupled, false>(a, n, w, g, m, v, x, out);
}

template <typename Grad, bool kOut>
void by_decay(const AdamPass& a, size_t n, float* w, const Grad* g, float* m, float* v, float* x, uint16_t* out) {
    a.decay != 0.0f ? by_largest<Grad, kOut, true>(a, n, w, g, m, v, x, out)
                    : by_largest<Grad, kOut, false>(a, n, w, g, m, v, x, out);
}

template <typename Grad>
void by_out(const AdamPass& a, size_t n, float* w, const Grad* g, float* m, float* v, float* x, uint16_t* out) {
    out != nullptr ? by_decay<Grad, true>(a, n, w, g, m, v, x, out) : by_decay<Grad, false>(a, n, w, g, m, v, x, out);
}

}  // namespace

// `largest` and `out` may be null; nothing else may. No two overlap, but `out` may be bf16 `grads`.
extern "C" void dsrun_adam_pass(const AdamPass* a, size_t n, int bf16_grads, float* master, const void* grads,
                                float* means, float* squares, float* largest, uint16_t* out) {
    if (bf16_grads != 0) {
        by_out(*a, n, master, static_cast<const uint16_t*>(grads), means, squares, largest, out);
    } else {
        by_out(*a, n, master, static_cast<const float*>(grads), means, squares, largest, out);
    }
}
