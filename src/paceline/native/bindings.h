// What the Python bindings share: array types, checks, weight matrices.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "layout.h"
#include "types.h"

namespace nb = nanobind;

namespace paceline {

template <class T>
using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out3 = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Bytes = In1<std::uint8_t>;

inline void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

// The table of a path ("": the fastest); throws where it cannot run here.
const Kernels* kernels_or_throw(const std::string& path);

std::size_t packed_bytes(int format, int n_out, int n_in);

// A weight matrix over bytes that Python owns (an array or a memory map).
struct PyLinear {
  Linear linear;
  Bytes bytes;

  PyLinear(int format, int n_out, int n_in, Bytes data);
  void run(In2<float> x, Out2<float> out, int threads, const std::string& path) const;
  void row(int index, Out1<float> out) const;
};

// A matrix of this shape (n_out < 0: any number of outputs); throws where it is another.
const Linear& checked(const PyLinear& l, int n_out, int n_in);

void bind_eagle(nb::module_& m);

}  // namespace paceline
