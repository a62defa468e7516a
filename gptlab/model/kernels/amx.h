// Products of bfloat16 by AMX, the matrix instructions of Intel's server processors since 2023: eight registers of 16
// rows of 64 bytes in each thread, and an instruction that adds the product of two of them to a third.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TDPBF16PS, TILELOADD.
// products.h includes this where the processor has them.

#pragma once

#include "products.h"

#include <sys/syscall.h>
#include <unistd.h>

#ifndef AMX_LOAD  // tests compute these in software
#define AMX_SIZES(sizes) asm volatile("ldtilecfg %0" ::"m"(sizes))
#define AMX_RELEASE() asm volatile("tilerelease" ::)
#define AMX_ZERO(to) asm volatile("tilezero %%tmm" #to ::)
#define AMX_LOAD(to, from, row_bytes) asm volatile("tileloadd (%0,%1,1), %%tmm" #to ::"r"(from), "r"(row_bytes) : "memory")
#define AMX_STORE(from, to, row_bytes) \
    asm volatile("tilestored %%tmm" #from ", (%0,%1,1)" ::"r"(to), "r"(row_bytes) : "memory")
#define AMX_ADD_PRODUCT(to, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to ::)
#endif

namespace {

constexpr long AMX = 16;            // rows of a register, and units or sums in a row of it
constexpr long AMX_TILE = 2 * AMX;  // rows and columns of a tile, which has four registers
// Units of a panel that are multiplied at a time: 16 KiB, or of terms those of 512 rows (SLICE_ROWS of layers.h); and panels
// that are multiplied by them.
constexpr long AMX_AT_ONCE = TERMS > 1 ? 768 : 128, AMX_LEFTS = 4;
static_assert(AMX_AT_ONCE % (TERMS * AMX) == 0, "registers of terms are not parted");

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
        AMX_SIZES(sizes);
    }
    ~Registers() { AMX_RELEASE(); }
};

// C (32, 32) = A B, or C + A B. The unit A(i, k) is a[i * a_row + k % 16 + k / 16 * a_step]. Of terms, the depth has whole
// registers; otherwise what remains after multiples of 16 is multiplied by vectors.
//
// Meanwhile a part of `next`, the same units of the panel that is multiplied after this one, is prefetched into the second
// cache: the processor itself prefetches to the end of a page of 4 KiB, and then waits (docs/LOG.md, 2026-11-30).
//
// A function of its own, since compilers do not know what instructions read that load these registers.
__attribute__((noinline)) inline void amx_tile(long depth, const unit* a, long a_row, long a_step, const unit* b,
                                               long b_row, bool add, float* c, long c_row,
                                               const unit* next = nullptr, long part = 0, long parts = 1) {
    constexpr long GROUPS = TERMS > 1 ? 6 : 1;  // of products, of so many units' depth
    const long lines = next ? (2 * TERMS * AMX / GROUPS + parts - 1) / parts : 0;
    next += part * lines * AMX * (depth / (TERMS * AMX)) * GROUPS;
    const long a_bytes = a_row * sizeof(unit), b_bytes = b_row * sizeof(unit), c_bytes = c_row * sizeof(float);
    float* low = c + AMX * c_row;
    if (add) {
        AMX_LOAD(0, c, c_bytes);
        AMX_LOAD(1, c + AMX, c_bytes);
        AMX_LOAD(2, low, c_bytes);
        AMX_LOAD(3, low + AMX, c_bytes);
    } else {
        AMX_ZERO(0);
        AMX_ZERO(1);
        AMX_ZERO(2);
        AMX_ZERO(3);
    }
    const auto left = [&](long term) {
        AMX_LOAD(4, a + term * a_step, a_bytes);
        AMX_LOAD(5, a + term * a_step + AMX * a_row, a_bytes);
    };
    const auto right = [&](long term) {
        AMX_LOAD(6, b + term * AMX * b_row, b_bytes);
        AMX_LOAD(7, b + term * AMX * b_row + AMX, b_bytes);
    };
    const auto add_products = [&] {
        for (long i = 0; i < lines; i++, next += AMX) __builtin_prefetch(next, 0, 2);
        AMX_ADD_PRODUCT(0, 4, 6);
        AMX_ADD_PRODUCT(1, 4, 7);
        AMX_ADD_PRODUCT(2, 5, 6);
        AMX_ADD_PRODUCT(3, 5, 7);
    };
    for (; depth >= TERMS * AMX; depth -= TERMS * AMX, a += TERMS * a_step, b += TERMS * AMX * b_row) {
        if constexpr (TERMS > 1) {
            left(1), right(1), add_products();
            right(0), add_products();
            left(2), add_products();
            left(0), add_products();
            right(1), add_products();
            right(2), add_products();
        } else {
            left(0), right(0), add_products();
        }
    }
    AMX_STORE(0, c, c_bytes);
    AMX_STORE(1, c + AMX, c_bytes);
    AMX_STORE(2, low, c_bytes);
    AMX_STORE(3, low + AMX, c_bytes);
    constexpr int ROWS = 8;
    for (long i = 0; depth > 0 && i < AMX_TILE; i += ROWS)
        tile<ROWS, AMX_TILE / W, true>(depth, a + i * a_row, a_row, 1, b, b_row, c + i * c_row, c_row);
}

// Turns units of panels of 32 columns, those from `first` to `last`, both multiples of 16: of each 16 the columns (16, 32)
// become rows (32, 16), as the left operand of a tile has them.
inline void turn_panels(unit* panels, long count, long depth, long first, long last) {
    for (long p = 0; p < count; p++)
        for (long u = first; u < last; u += AMX) {
            unit* block = panels + (p * depth + u) * AMX_TILE;
            vec halves[2][AMX];
            for (long h = 0; h < 2; h++) {
                for (long i = 0; i < AMX; i++) halves[h][i] = load(block + i * AMX_TILE + h * AMX);
                transpose_vectors(halves[h]);
            }
            for (long i = 0; i < AMX_TILE; i++) store(block + i * AMX, halves[i / AMX][i % AMX]);
        }
}

// As `add_outer_products` of panels.h, of panels of 32 columns, those of x turned if `x_left`, and otherwise those of dy.
//
// A part of the right operand's panel is in the first cache while some left panels are multiplied by it: there may be more
// of them than the second cache holds. far: are_far of panels.h.
template <class Part>
void add_outer_products_by_amx(const unit* dy, const unit* x, bool x_left, long depth, long outputs, long inputs, Part part,
                               bool far, bool first, float* c) {
    const auto lefts = x_left ? part.panels : part.tiles, rights = x_left ? part.tiles : part.panels;
    const unit *left = x_left ? x : dy, *right = x_left ? dy : x;
    alignas(64) float products[AMX_LEFTS][AMX_TILE * AMX_TILE], turned[AMX_TILE * AMX_TILE];
    for (long r = rights.first; r < rights.last; r++)
        for (long l0 = lefts.first; l0 < lefts.last; l0 += AMX_LEFTS) {
            const long n_left = std::min(AMX_LEFTS, lefts.last - l0);
            for (long k = 0; k < depth; k += AMX_AT_ONCE)
                for (long l = 0; l < n_left; l++)
                    amx_tile(std::min(AMX_AT_ONCE, depth - k), left + ((l0 + l) * depth + k) * AMX_TILE, AMX,
                             AMX * AMX_TILE, right + (r * depth + k) * AMX_TILE, AMX_TILE, k > 0, products[l], AMX_TILE,
                             far ? right + ((r + 1) * depth + k) * AMX_TILE : nullptr, l0 + l - lefts.first,
                             lefts.last - lefts.first);
            for (long l = 0; l < n_left; l++) {
                for (long i = 0; x_left && i < AMX_TILE; i += AMX)
                    for (long j = 0; j < AMX_TILE; j += AMX)
                        transpose_square(products[l] + i * AMX_TILE + j, AMX_TILE, AMX, turned + j * AMX_TILE + i, AMX_TILE);
                const float* from = x_left ? turned : products[l];
                const long row = (x_left ? r : l0 + l) * AMX_TILE, column = (x_left ? l0 + l : r) * AMX_TILE;
                for (long i = 0; i < std::min(AMX_TILE, outputs - row); i++)
                    for (long j = 0; j < std::min(AMX_TILE, inputs - column); j += W) {
                        float* to = c + (row + i) * inputs + column + j;
                        const vec sum = load(from + i * AMX_TILE + j);
                        const long count = inputs - column - j;
                        store_part(to, first ? sum : load_part(to, count) + sum, count);
                    }
            }
        }
}

}  // namespace
