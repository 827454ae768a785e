"""The grids of the IQ formats: a code in a block is the number of an entry, which is several weights.

They are data that the formats define, made by k-means over the weights of models; no rule makes them. `_PACKED` is
written by tests/support/packgrids.py. No torch.
"""

from __future__ import annotations

import base64
import functools
import zlib
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """`entries` of `size` weights each, whose values are among `values`."""

    entries: int
    size: int
    values: tuple[int, ...]


_TWO_BITS = 8, 25, 43
GRIDS = {
    "IQ2_XXS": Grid(256, 8, _TWO_BITS),
    "IQ2_XS": Grid(512, 8, _TWO_BITS),
    "IQ2_S": Grid(1024, 8, _TWO_BITS),
    "IQ3_XXS": Grid(256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ1_S": Grid(2048, 8, (-1, 0, 1)),
}
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4 and NVFP4


@functools.cache
def grids() -> dict[str, np.ndarray]:
    """Each grid as int8 [entries, size]."""
    differences, made, start = np.frombuffer(zlib.decompress(base64.b85decode(_PACKED)), "<u2"), {}, 0
    for name, grid in GRIDS.items():
        numbers = np.cumsum(differences[start : start + grid.entries], dtype=np.int64)
        bits = (len(grid.values) - 1).bit_length()
        index = numbers[:, None] >> bits * np.arange(grid.size) & (1 << bits) - 1
        made[name] = np.array(grid.values, np.int8)[index]
        start += grid.entries
    return made


_PACKED = (
    "c-oy=U5s5-"
    "6<+(?v+v(I_h+UvbLY<7&Yfw8c7#$#NCgREP(+aw6HFc2j@%YW|Df35PpfHy5PkE}5DWncnlv#cSmOhR&@>v24?f7dFZxPIj6Rqc6aCiOYwx?y{h1E"
    "r=H7G8-fOSDe!sQ$xkL$-@JXnG-yGL6z8$%*QVrK0o~yJ-0~xb)2R%e{bPl7dbc$XuJUXLvWzek&-"
    "5hP}^8wlqelv6hJ8WX@Ds3C9G+o{ElXR8tr{B>mePA8GKIqnEzh`9kO{#;_&%ym2!_OA8_s}c!C3>9}=zWo5lOCiOF!L&1r?)IieIM-wr-ZKI_ibGN"
    "r*sSS3()STL*|NEq;Ju$%)9fk##L%!Kc~qhNb(@oTgcd=doeRhuZRq%Apdvq^j9*8<7??1dICJw==by}U9!xt3cXL^_bNR=PtgaEA%QLaO<$p3ni-"
    "5giuHe@|5{$Z0gaAf?HB0{*eC<#^K>J*(P3TgffO&nW*hV#{lj=)tkN6wFg-@!#{4S1X%f>g|FUe`9-"
    "YSM1^NRlwvYBv!)%s*N`EguMn~ue*ncs(H~kG!!T)?;(UI=RvyTOTZ!vRvgvN1+so17nwPQTG7NV(6m(9*QC6O=2d2p<}D0d6Ag!#|XRa1;<3vN!54"
    "cMqoTjZmqN|!NGrROku+U_hx4w}wXDK=s81hML*-DJO*Q7X0=`{hMlaT8BR=xyV2;4q%<qVIv~G`)`~+OkD0{64E<b-t@2x?hE7pM+k=g-aI_-"
    "h^H=^aW&SmwrSi5UB|)bA;}Ob^Zv-D~Q~uB+D<)PuF<Vc9V6skYJ!W+~K`VF+PU2xu_Z6qZ4!n7P=2l*Nx}WLRP&FsqYpYUPU%cil9xk97jz;H-"
    "IH)Xv+-oVh!H`sITDr6IkF=G%#~?C%8X?l?SlqbLOh`5;cJ!`w<K4<^b~TIkQ0j5m^TGwd6eV_;1K6NHsqx0ye>m`E3P%b0%LCL`-"
    "M}_s7+%CCSl`A<iCx-"
    "@ZwY)60hac0|@6fbV+dNx_?0I&M8W9R^zLLnQwb7P$;0_>5TLJvxguZ&5orMn9uJ13BKX4zCv=!*_ssRXPg$^4LE5s>I+i`ir@no`-"
    "fk%9h!t@8kYWe9ywJA1?p-u2YBvi_aF_Dt~#-Do<yX9N+B;+2v{P5YBbjWngxeV^s29VaHmuPfTfdfpB?*Z%(3O{9iKTI@(B!m@CKlf+CL}?-"
    "w|>kYij&o8r*}h}m;?lIBZemW};Y-"
    "%;z`A^SzmUMpVe>GjU3I)6AzPNVP$Z^uyPcFFSCr~R>&S10i50s)@#_1;eNmGegn($w*ZeU$4yc|pE9@Utv_$k7dOwjVd65w|<dxL)~M(4}i8w)1_+"
    "UMI;9QN<U51?v+K+xvEDhg`_VBBC}WUv~1HkJ?<~p<sFQQR8ekQL%H)y$!vji`8lC*Qc&skZLV;*zS~3JLkzqi)pUYFPh!1o+SOS<GE?Z=ebuNb{So"
    "I7M1R}b@)(3rCZyn3p+V`Jqj$gQzYU3d<B{M9Q~LsO6@y_+I0>ii)KKB`C?z-yNVbI^9Xq+TjWl)-"
    "InBTC5&7jvt)nQc0~6XJaV&;fsadPb3bD2U7Sx6=^Y0)mM@>`?ID*sx&pV;8T4X1$045_2I%Hj=r!ZLdmh?8g7F8;CF?6<RdeET+`SC>UXv3NW6~4y"
    "yQ1C4CRQ#Z>$`NX`K?(&Z~1F<m@i4cz}>(pbO~Jl6YxzaB_lap13f>v(F*QdZfDYiIO>XwFjXCVnz)u_b%r?GgWk#tbt2<?sEtVIV3c{zgSs7fyDP6"
    "V(11sH?Bij+0ts28CZuX$T?QWe;fWO8(jM$^6f>(4r!;s!QK>7i0Bcs2CnseCzYWO4x*fuI4O|xSTnFvvMVbyg>vfz5tqoFSxGu|X4a~GrH)iS6_}v"
    "4FG9+5Y?z5QLz;_PRP0;4p<0zh5*tZR;8F;7<zh$!XJmyNm{VwUDtDtD(+85ob=pFZ}-"
    "t6};Lt>_E%Zk0ASOKSXta%vRZlh0NXP##Z7)a6veH~f242c&YGw-"
    "*CQMS=6dQt+Fk^PN)5?#rjvued8_=BU@)1^YiBdI)9z&#a985uD$R}vcL<~cQR$2$7B;yuc;qM;tl<f$YU<=>W|mWwB=v@MA-XSW$VRfM;vVM*p9Il"
    "WfCMm2?hP2-`Yt17ZvMdr(bm8D<{mZUCUZv`ixk(D#J%hXB@%^K!8AMtF_LD8-"
    "eB8cfYHh6WlAY~GyGHN6D+)!VYB!5f6{%(&&d8&sDtxJBE)S4;u^}BM;X85fMYVurH`<I&Rk>R&0)OBP+D!JQ`%&@?uN|3M;V#C#zvLZx9EzuSk+>G"
    ";KS8U_)rluItl!&krMKj{zhVafrf;yh|;IpdMWt4F~ar$$Xx25w<R6DD)b0VD;J8%bHk{q=Ww(XZZVEpMy^zfU8E@YUKcTAaBsVlr3&N<vK>t0sya#"
    "bu@mt7mkQ44M@L5*A^hwFf=v3s!U9?_(UtB+Ymk~VnlMUKu&ELpK-"
    "E>a%>EuWCNBbfv3GB6>*s6#u)As5tOly2dv7jlm6*_Fs>g15`+Mc_djGIS7;@%b;67%oeE<}%ijNG*%a{oDy?munPqqzt<VtJ#%655NB8*!pFuBbjv"
    "HZiIJE#ozpN*0_~D)xVBi4$1wtqEAbCcf_}4$q9#I!@jr!4b#w-y4hzyy%F^toO4!sj9jEYYbMERCtBg8uHne(39_d;vZ1!gr|Mn>?Q)QGID5vLh-c"
    "inGxrUpPQ?zRoud^$loj*5HLO&TQs}LmN6Wg#_k;c5E%#<NQ;SxyemUUh(2j0xPyC$*>sM6H;~^5ped5NlNJbM;b`<{{x(&T*#5$$O|0bZ!QnaR`va"
    ";l*u%7X&DknTk=ZuxeiqC6)uOvjm3?d~_EmFjC60{!5W5u>rt#UQtbV}+g_g_Wt_!wgxI%DIQaCRw1#ptY$v|J>y>ML)xz93XdvZFE~i>>ylqjM)sE"
    "1Yp-uO>3$c4Ud3#(gfGM;wceb}jgSc=p?t9V)UX=WHh4Se8hu)0v4G#uoRQFX(k3KC{{<*EEKmkDSKL`Q*r|p~e$3cHZUkdeGF#d{{KKf@>x13rbOh"
    "`4e&_@_!cM*`KH~nfrRkq@KLXu~HRQF*}3Y;wsu6;g)FxC2HYH;8sO9Z^m-"
    "TzqRnsKFWttZ=_C)$E=fiORzSJyk^6jv}&OB(a@DzT@Q#qFu9Cmh{a0uzGIj>iN<28eN!5^@mmUaZi^8r(TM6rcJ~}F!Z%6qd|lqb!Hzb@AsckC1$}"
    "wVie5d=Zx@itNl}q%okZy5tm<V<3M>2@%%VTGG%KAfD<eK*nN~HQ*&1~^WlZ4V{FWB*(IHIiSyQlDM^7`J+WDR3h%IZTqHIySacxKU?x>GOXNK{%RX"
    "95g(RY;hVnAq9s8va!f^;<w+*m64=|@hQq2<}OHDr36PfjBz$6h^8IuxFiPr1b1t-Zb|SyPSn$bnF)o(!$f^t5Jr4QnB<Ye9aN^JzOo-aJH~$InIdc"
    "dbz29qzevmaAi_%FSa-"
    "(j)pl;hg*)lt^$DvWoMd!@OsWQQJDZ72ll~t88ECl3)vu6WdXh<^MHCF{l(p#9sA(8hQz5ffG_2GTF;$*2dmT#GWO28{qIWQJ=aK)w9NVZALv=72K("
    "y?w(Xj<l+ATqrRw(<m;mBl4%a6Vz~r8wSPC|(8fsZZ_2(ootPi3G+C$@`PBX}2{C2^)+K_)iF!1f+AAK^`Zvz|f^l7DBb-"
    "{@zZ2*5|7&N1j>b)~1`M$-"
    "?opc38xLhQdKz>1m`Yvc6VCQn{qBUmmn%bOf*pM2X^p&Tc9O4&C#UtwOn>`0PwUQbCcKUIRo8@7B|R_1eO@I*h7CQgN9ewIIerVg9rWst*s3HQe}c2"
    "z6K43IOB4B6AHgBVzprOBqd2rx=sSJpq+;*RuJMR@#Ry*xIlZNskjhzjh)lk=vtCQmOS<=Bh8!Yoo0;&2zaA<xXToaes|F+gKlt8xX#%47ZgKc8i_5"
    "QpoOb(#|4i0HMZ93AMFOMScziircG4bFOL{rhgpQxj3w2p4#;rQVZ<t)qU+LJ%!u@+6$3n3q$P4|Ms{t2-"
    "H&W3$4QR;LUzhmt=$Xh{;uvWT?x1^1yY!yidGtDn*$Xs@%XlvRACeqL>;"
)
