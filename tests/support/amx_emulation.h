// AMX in software: what its instructions compute, by the loops of Intel's manual (Software Developer's Manual, volume 2).
// Included before a source that is compiled for a processor with AMX.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/syscall.h>
#include <unistd.h>

namespace amx_emulation {

struct Sizes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

inline thread_local Sizes sizes;
inline thread_local unsigned char registers[8][16][64];

inline void require(bool fine, const char* what) {
    if (!fine) std::fprintf(stderr, "AMX: %s\n", what), std::abort();
}

inline void load_sizes(const void* from) {
    static_assert(sizeof sizes == 64, "as the instruction reads them");
    std::memcpy(&sizes, from, sizeof sizes);
    require(sizes.palette == 1 && sizes.start_row == 0, "palette 1 is the only one");
    for (int i = 0; i < 8; i++) require(sizes.rows[i] <= 16 && sizes.row_bytes[i] <= 64, "registers are smaller");
    for (int i = 8; i < 16; i++) require(!sizes.rows[i] && !sizes.row_bytes[i], "there are eight registers");
    std::memset(registers, 0, sizeof registers);
}

inline void release() { sizes = {}; }

inline void zero(int to) {
    require(sizes.palette == 1, "registers have no size");
    std::memset(registers[to], 0, sizeof registers[to]);
}

inline void load(int to, const void* from, long stride) {
    zero(to);
    for (int row = 0; row < sizes.rows[to]; row++)
        std::memcpy(registers[to][row], static_cast<const char*>(from) + row * stride, sizes.row_bytes[to]);
}

inline void store(int from, void* to, long stride) {
    require(sizes.palette == 1, "registers have no size");
    for (int row = 0; row < sizes.rows[from]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, registers[from][row], sizes.row_bytes[from]);
}

inline float number(const unsigned char* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Fails a program that never multiplied by these instructions.
struct Used {
    bool used = false;
    ~Used() { require(used, "not a product was computed"); }
};

inline Used products;

// Sums of the even and of the odd numbers of a row of `a` times a column of pairs of `b`, both added to what `to` holds.
inline void multiply(int to, int a, int b) {
    products.used = true;
    require(sizes.palette == 1, "registers have no size");
    require(sizes.row_bytes[a] / 4 == sizes.rows[b] && sizes.rows[a] == sizes.rows[to] &&
                sizes.row_bytes[b] == sizes.row_bytes[to],
            "sizes do not fit");
    for (int row = 0; row < sizes.rows[to]; row++)
        for (int column = 0; column < sizes.row_bytes[to]; column += 4) {
            float sum, even = 0, odd = 0;
            std::memcpy(&sum, &registers[to][row][column], 4);
            for (int k = 0; k < sizes.rows[b]; k++) {
                even += number(&registers[a][row][4 * k]) * number(&registers[b][k][column]);
                odd += number(&registers[a][row][4 * k + 2]) * number(&registers[b][k][column + 2]);
            }
            sum += even + odd;
            std::memcpy(&registers[to][row][column], &sum, 4);
        }
}

// The operating system's permission, which this processor's lacks.
inline long system_call(long number, long request, long feature) {
    require(number == SYS_arch_prctl && request == 0x1023 && feature == 18, "not a request for the registers");
    return 0;
}

}  // namespace amx_emulation

#define AMX_SIZES(from) amx_emulation::load_sizes(&from)
#define AMX_RELEASE() amx_emulation::release()
#define AMX_ZERO(to) amx_emulation::zero(to)
#define AMX_LOAD(to, from, row_bytes) amx_emulation::load(to, from, row_bytes)
#define AMX_STORE(from, to, row_bytes) amx_emulation::store(from, to, row_bytes)
#define AMX_ADD_PRODUCT(to, a, b) amx_emulation::multiply(to, a, b)
#define syscall amx_emulation::system_call
