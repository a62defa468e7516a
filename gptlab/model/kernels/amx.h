// Products of bfloat16 by AMX, the matrix instructions of Intel's server processors since 2023: eight registers of 16
// rows of 64 bytes in each thread, and an instruction that adds the product of two of them to a third.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TDPBF16PS, TILELOADD.
// products.h includes this where the processor has them.

#pragma once

#include "products.h"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr bool BY_AMX = PAIRS;

constexpr long AMX = 16;            // rows of a register, and units or sums in a row of it
constexpr long AMX_TILE = 2 * AMX;  // rows and columns of a tile, which has four registers
constexpr long AMX_DEPTH = 1024;    // units of a panel that are transposed at a time: 128 KiB

// Linux refuses these registers to processes that did not ask for them (docs.kernel.org/arch/x86/xstate.html).
inline bool registers_are_permitted() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Gives the registers their full size in this thread, while it exists.
struct Registers {
    Registers() {
        static constexpr struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } sizes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        _tile_loadconfig(&sizes);
    }
    ~Registers() { _tile_release(); }
};

// C (32, 32) = A B, or C + A B. The unit A(i, k) is a[i * a_row + k % 16 + k / 16 * a_step]. What remains of the depth
// after multiples of 16 is multiplied by vectors.
//
// A function of its own, since compilers do not know what instructions read that load these registers.
__attribute__((noinline)) inline void amx_tile(long depth, const unit* a, long a_row, long a_step, const unit* b,
                                               long b_row, bool add, float* c, long c_row) {
    const long a_bytes = a_row * sizeof(unit), b_bytes = b_row * sizeof(unit), c_bytes = c_row * sizeof(float);
    float* low = c + AMX * c_row;
    if (add) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + AMX, c_bytes);
        _tile_loadd(2, low, c_bytes);
        _tile_loadd(3, low + AMX, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; depth >= AMX; depth -= AMX, a += a_step, b += AMX * b_row) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(5, a + AMX * a_row, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + AMX, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + AMX, c_bytes);
    _tile_stored(2, low, c_bytes);
    _tile_stored(3, low + AMX, c_bytes);
    constexpr int ROWS = 8;
    for (long i = 0; depth > 0 && i < AMX_TILE; i += ROWS)
        tile<ROWS, AMX_TILE / W, true>(depth, a + i * a_row, a_row, 1, b, b_row, c + i * c_row, c_row);
}

// As `add_outer_products` of panels.h, of panels of 32 columns. Their depth lies down the rows, and has to lie along them
// in the left operand, which is the one with fewer columns: then less is transposed.
template <class Part>
void add_outer_products_by_amx(const unit* dy, const unit* x, long depth, long outputs, long inputs, Part part, bool first,
                               float* c) {
    const bool x_left = inputs < outputs;
    const auto lefts = x_left ? part.panels : part.tiles, rights = x_left ? part.tiles : part.panels;
    const unit *left = x_left ? x : dy, *right = x_left ? dy : x;
    alignas(64) unit rows[AMX_TILE * AMX_DEPTH];  // (depth / 16, 32, 16)
    alignas(64) float products[2][AMX_TILE * AMX_TILE];
    for (long l = lefts.first; l < lefts.last; l++)
        for (long k = 0; k < depth; k += AMX_DEPTH) {
            const long n = std::min(AMX_DEPTH, depth - k);
            const unit* panel = left + (l * depth + k) * AMX_TILE;
            for (long u = 0; u < n; u += AMX)
                for (long i = 0; i < AMX_TILE; i += AMX)
                    transpose_square(panel + u * AMX_TILE + i, AMX_TILE, n - u, rows + u * AMX_TILE + i * AMX, AMX);
            for (long r = rights.first; r < rights.last; r++) {
                const unit* b = right + (r * depth + k) * AMX_TILE;
                amx_tile(n, rows, AMX, AMX * AMX_TILE, b, AMX_TILE, false, products[0], AMX_TILE);
                for (long i = 0; x_left && i < AMX_TILE; i += AMX)
                    for (long j = 0; j < AMX_TILE; j += AMX)
                        transpose_square(products[0] + i * AMX_TILE + j, AMX_TILE, AMX,
                                         products[1] + j * AMX_TILE + i, AMX_TILE);
                const float* from = products[x_left];
                const long row = (x_left ? r : l) * AMX_TILE, column = (x_left ? l : r) * AMX_TILE;
                for (long i = 0; i < std::min(AMX_TILE, outputs - row); i++)
                    for (long j = 0; j < std::min(AMX_TILE, inputs - column); j += W) {
                        float* to = c + (row + i) * inputs + column + j;
                        const vec sum = load(from + i * AMX_TILE + j);
                        const long count = inputs - column - j;
                        store_part(to, first && k == 0 ? sum : load_part(to, count) + sum, count);
                    }
            }
        }
}

}  // namespace
