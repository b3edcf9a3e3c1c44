// The bytes of an Adam step and as little else as can be: reads gradient, mean, square and weight, writes mean, square,
// weight and parameter. bf16 is widened and cut off by shifts.

#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" void adam_stream(size_t n, const uint16_t* __restrict g, float* __restrict m, float* __restrict v,
                            float* __restrict w, uint16_t* __restrict p) {
    for (size_t i = 0; i < n; ++i) {
        const uint32_t wide = static_cast<uint32_t>(g[i]) << 16;
        float x;
        std::memcpy(&x, &wide, sizeof x);
        m[i] = m[i] * 0.5f + x;
        v[i] = v[i] * 0.5f + m[i];
        w[i] = w[i] * 0.5f + v[i];
        uint32_t bits;
        std::memcpy(&bits, &w[i], sizeof bits);
        p[i] = static_cast<uint16_t>(bits >> 16);
    }
}
